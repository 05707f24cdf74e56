"""State: who owns what. Conversations, their token cache, and the session actor that holds the socket."""
