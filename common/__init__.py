"""A local Ray serves only those who know this run's token. Ray reads its mode when it is imported."""

import os
import secrets
import sys

if "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
