"""What code may not do with files, processes and the network once its process has given up those rights."""

# ruff: noqa: E501
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.rewards._sandbox.running import failure, in_parallel, module, needs_layers, raised, statuses


@needs_layers
def test_isolation_keeps_open_files_from_truncation() -> None:
    """As on Linux 5.13 to 6.1: Landlock of the first version, played by the filter without Landlock."""
    code = (
        "import ctypes, os, sys\nfrom trl_grpo_ext.rewards._sandbox import layers\n"
        "open('x', 'w').write('kept')\nctypes.CDLL(None).prctl(38, 1, 0, 0, 0)\nassert layers._restrict_calls(ctypes.CDLL(None))\n"
        "for mode in (os.O_RDONLY, 3):\n"
        "    try: os.open('x', mode | os.O_TRUNC)\n    except PermissionError: pass\n    else: sys.exit('emptied')\n"
        "assert open('x').read() == 'kept'\nopen('x', 'w').close()\nassert open('x').read() == ''\nos._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    folder = tempfile.mkdtemp()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# Of `os`: files elsewhere (the judge's folder lies beside its own), then other processes.
_OS = """
listdir('..')   listdir('/')   mkdir('../outside')   rmdir('/var/tmp')   symlink('/etc/passwd', 'link')   mkfifo('pipe')
chmod('.', 0)   chown('.', 1, 1)   utime('/etc')   truncate('/etc/hostname', 0)   setxattr('.', 'user.x', b'1')
memfd_create('x')   execv('/bin/sh', ['sh'])   posix_spawn('/bin/sh', ['sh'], {})   kill(os.getppid(), 9)   kill(-1, 9)
kill(0, 9)   killpg(os.getpgid(os.getppid()), 9)   setpriority(os.PRIO_PROCESS, os.getppid(), 19)   fork()
sched_setaffinity(os.getppid(), [0])   setuid(65534)   chroot('.')
"""

FORBIDDEN = [
    *(f"import os\nos.{call}" for call in re.split(r"\s{3,}|\n", _OS.strip())),
    *(f"open({file}, 'w')" for file in ("'../tests.py'", "'/tmp/planted'", "'/dev/shm/planted'", "'/usr/lib/x'")),
    *("open('/etc/passwd')", "open('/proc/self/environ')", "import os\nopen(f'/proc/{os.getppid()}/environ')"),
    "import json\nopen(json.__file__, 'ab')",
    *(f"import json, os\nos.open(json.__file__, {mode} | os.O_TRUNC)" for mode in ("os.O_RDONLY", "os.O_RDWR", "3")),
    "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 1000'])",
    "import signal, os\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    *(f"from socket import *\nsocket(AF_{one}, SOCK_DGRAM)" for one in ("INET", "INET6", "UNIX", "NETLINK", "PACKET")),
]


@needs_layers
def test_isolation_of_files_processes_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    codes = [*FORBIDDEN, f"open({str(secret)!r}).read()", f"open({str(secret)!r}, 'w')"]
    found = {code: failure(run) for code, run in zip(codes, in_parallel(codes), strict=True)}
    assert found == dict.fromkeys(codes, "PermissionError")
    assert secret.read_text() == "secret"
    limit = raised("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert limit in ("ValueError", "PermissionError")


@needs_layers
def test_a_pair_of_sockets_reaches_nobody_else(tmp_path: Path) -> None:
    pair = "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "s"))
        for send in ("sendto(b'x'", "sendmsg([b'x'], [], 0"):
            assert raised(f"{pair}a.{send}, {str(tmp_path / 's')!r})") == "PermissionError"
    assert statuses(module(f"{pair}a.send(b'x')\nc = b.recv(1)", "assert c == b'x'")) == ["pass"]


@needs_layers
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
def test_raw_system_calls_do_not_help() -> None:
    code = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    def refused(number, *arguments):
        return libc.syscall(number, *arguments) == -1 and ctypes.get_errno() in (1, 38)
    """
    # clone3, io_uring_setup, bpf, ptrace, vfork, unshare, mount, openat2, creat, truncate, sendfile, copy_file_range,
    # splice, fallocate, perf_event_open, userfaultfd, process_vm_readv, keyctl, reboot
    numbers = [435, 425, 321, 101, 58, 272, 165, 437, 85, 76, 40, 326, 275, 285, 298, 323, 310, 250, 169]
    run = module(code, *(f"assert refused({number}, 0, 0, 0, 0, 0)" for number in numbers))
    assert set(statuses(run)) == {"pass"}, run.messages
    assert module("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)").status == -signal.SIGSYS
