"""What every framework needs."""
