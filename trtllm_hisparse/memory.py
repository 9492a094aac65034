"""Memory this process may still take."""

from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take: what the machine has free, or less where a container limits it."""
    meminfo = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    rooms = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),  # cgroup v2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # v1
    ):
        try:
            limit, usage = ((cgroup / name).read_text().strip() for name in (limit_file, usage_file))
        except OSError:
            continue
        if limit != "max":
            rooms.append(max(0, int(limit) - int(usage)))
    return min(rooms)
