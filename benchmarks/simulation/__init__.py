"""`paceline simulate`: the code that decides in production, over simulated devices and networks."""
