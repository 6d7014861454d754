"""The parameters of a module, and what becomes of each one's gradient before it is sent."""
