"""From items to token ids to chunks: chat formats, tokenizers, engines and the link to them."""
