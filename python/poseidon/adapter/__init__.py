"""What every framework's adapter needs, without any framework. Nothing here imports more than NumPy."""
