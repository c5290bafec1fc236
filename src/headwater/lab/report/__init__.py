"""The page about a run of the lab: one file, which needs nothing but itself."""

from headwater.lab.report.page import write_report

__all__ = ["write_report"]
