"""The report: one page on a repository, made of what it says itself; nothing on it comes from elsewhere.

`from engine.report import gather_report, make_report_page`.
"""

from engine.report.gather import gather_report
from engine.report.model import JobFacts, ReportFacts
from engine.report.page import make_report_page

__all__ = ["JobFacts", "ReportFacts", "gather_report", "make_report_page"]
