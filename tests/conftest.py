"""What all Python tests have in common."""

import os
import sys
from pathlib import Path

# Jobs that fail on purpose would leave their records with the system's temporary files; tests of records name a place.
os.environ["POSEIDON_FLIGHT_RECORD"] = "off"

# Helpers of tests in all folders.
sys.path.append(str(Path(__file__).parent / "python"))
