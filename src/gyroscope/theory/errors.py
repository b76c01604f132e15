"""What can go wrong in the theory."""

from gyroscope.errors import DynamicsError

__all__ = ["DynamicsError"]
