import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # packers.py, also as a subject's module
