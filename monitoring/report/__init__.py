"""`report.html`: one self-contained page, no network and no script."""
