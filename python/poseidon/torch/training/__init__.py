"""One wrapped module's part in a job."""
