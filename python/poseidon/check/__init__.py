"""Looks before a run at what often makes one slow or fail: this machine, and the network between the machines."""
