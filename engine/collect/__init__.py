"""Collection: plans, runs and what they leave behind (design 0002, D1 to D11; design 0006)."""
