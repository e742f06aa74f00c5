import common  # noqa: F401  before Ray, see there
