"""What reliability.py and soak.py share: real processes that can be killed and frozen, and what they say."""
