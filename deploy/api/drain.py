"""Whether a server still takes requests."""

from ...cluster.errors import RequestError

RETRY_S = 10  # another replica, or this one after its restart


class Drain:
    """While it is on, what has begun goes on and nothing new begins."""

    def __init__(self) -> None:
        self.is_on = False

    def check(self) -> None:
        """Raise RequestError 503 while it is on."""
        if self.is_on:
            raise RequestError(
                "this server is about to stop; send the request again, to another one",
                status=503,
                code="shutting_down",
                error_type="server_error",
                retry_after_s=RETRY_S,
            )
