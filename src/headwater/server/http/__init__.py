"""HTTP itself: listening, access, request ids, errors, the exchange with the engine, and the orderly shutdown."""
