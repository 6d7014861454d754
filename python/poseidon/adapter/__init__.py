"""What every framework's adapter needs, without any framework: NumPy is the most that is imported here."""
