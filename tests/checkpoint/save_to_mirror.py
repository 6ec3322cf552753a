"""Saves steps 10 and 20 of a run with a mirror, and hangs when half of step 20 is copied."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import s3fs

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.mirror import open_url
from maxpipe.config import CheckpointConfig

put_file, copied = s3fs.S3FileSystem._put_file, []


async def stop_half_way(self, source, target, **options):
    if len(copied) >= 3:
        print("half of 20", flush=True)
        await asyncio.sleep(600)
    await put_file(self, source, target, **options)
    copied.extend([target] if "/20/" in target else [])


def main():
    s3fs.S3FileSystem._put_file = stop_half_way
    mirror = open_url(sys.argv[2], "checkpoint.mirror")
    checkpointer = Checkpointer(Path(sys.argv[1]), CheckpointConfig(), mirror=mirror)
    for step in (10, 20):
        rows = np.arange(12, dtype=np.int64).reshape(4, 3) + step * 2**40
        checkpointer.save(step, {"x": rows}, rows, {})
    checkpointer.close()


if __name__ == "__main__":
    main()
