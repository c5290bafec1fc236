"""The lab: the cache, planner and scheduler that serve, with a counting executor and a virtual clock. No torch."""
