"""The suite: many models, rates and numbers of hosts by the same methods, with raw data that others can repeat."""
