"""`paceline loadtest`: known load on an OpenAI-compatible server, and a report of it."""
