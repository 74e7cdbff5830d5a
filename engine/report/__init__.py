"""The report: one page on a repository, made of what it says itself; nothing on it comes from elsewhere.

`gather.gather_report` reads the facts, `page.make_report_page` lays them out.
"""
