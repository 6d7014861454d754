"""What all Python tests have in common."""

import os

# Jobs that fail on purpose would leave their records with the system's temporary files; tests of records name a place.
os.environ["POSEIDON_FLIGHT_RECORD"] = "off"
