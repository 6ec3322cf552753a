import socket
import threading
import time

import pytest

from maxpipe.checkpoint.mirror import Mirror
from maxpipe.config import ConfigError
from maxpipe.storage.object_store import Deadline, StoreSilent, explained, open_store


def test_deadline_gives_up_a_silent_request_but_not_one_that_makes_progress():
    for seconds in (0, 60):
        assert Deadline(seconds).wait(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        Deadline(60).wait(lambda: 1 // 0)
    with pytest.raises(StoreSilent, match=r"not answered for 0\.2 s"):
        Deadline(0.2).wait(threading.Event().wait)
    deadline = Deadline(0.5)
    callback = deadline.callback()

    def transfer():
        for _ in range(10):
            time.sleep(0.1)
            with callback.branched("local", "remote") as child:
                child.relative_update(1)
        return "done"

    assert deadline.wait(transfer) == "done"


def test_mirror_store_that_never_answers_is_given_up(monkeypatch, s3):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        url = "s3://bucket/runs/base/checkpoints"
        store = open_store(url, "checkpoint.mirror")
        with (
            pytest.raises(ConfigError, match=r"has not answered for 0\.5 s"),
            explained(url, "checkpoint.mirror"),
        ):
            Mirror(url, store, deadline_seconds=0.5)
        monkeypatch.setattr(Mirror, "_list", lambda self: frozenset())
        mirror = Mirror(url, store, deadline_seconds=0.5)
        # s3fs alone would wait for this one without end.
        with pytest.raises(StoreSilent):
            mirror.write_file("config.yml", b"steps: 1\n")


def test_open_store_url_with_credentials_is_refused_without_showing_them():
    for url in [
        "s3://AKIAKEY:pass-word@bucket/runs",
        "s3://AKIAKEY:pass/-word@bucket/runs",
        "gs://pass-word@bucket/runs",
    ]:
        with pytest.raises(ConfigError, match="a URL must not hold credentials") as caught:
            open_store(url, "checkpoint.mirror")
        assert f"{url[:5]}***@bucket/runs:" in str(caught.value)
        assert "word" not in str(caught.value)
    pytest.importorskip("s3fs", reason="needs the extra `s3`")
    for url in [
        "s3://bucket/models/a:b@2024/x",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/a@b",
    ]:
        assert open_store(url, "data.path").protocol
