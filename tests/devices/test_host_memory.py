"""What the host, or a container on it, has free of its memory."""

from maxpipe.devices.host_memory import free_memory


def test_free_memory_in_a_container_is_what_its_limit_leaves(tmp_path):
    for limit, free in (
        ("max", 8 * 1024),
        ("5000", 5000 - 4000 + 1500),
        ("90000", 8 * 1024),
        ("2000", 0),
    ):
        (tmp_path / "meminfo").write_text(
            "MemTotal:  16 kB\nMemAvailable:    8 kB\nHugePages_Free: 0\n"
        )
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("4000\n")
        (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 1000\nactive_file 500\n")
        assert free_memory(tmp_path / "meminfo", tmp_path) == free, (limit, free)
    (tmp_path / "memory.max").unlink()  # not in a container
    assert free_memory(tmp_path / "meminfo", tmp_path) == 8 * 1024
