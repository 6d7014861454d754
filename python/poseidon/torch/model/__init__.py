"""The parameters of a module, and what happens to each gradient before it is sent."""
