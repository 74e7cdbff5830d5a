"""The report: one page on a repository; `gather` reads the facts, `page` writes them by the template `page.html`."""
