"""The report: one page on a repository, made of what the repository and the history of restore drills say.

`gather.gather_report` reads the facts; `page.write_report` writes the page, from the template `page.html`.
"""
