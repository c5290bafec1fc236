"""The page about a run of the lab: one file, which needs nothing but itself."""

from headwater.sim.report.page import write_report

__all__ = ["write_report"]
