"""The rights that a process gives up before it runs untrusted code: on Linux, unprivileged, standard library only."""

# These run between a fork and the code, where nothing of pathlib is needed.
# ruff: noqa: PTH112, PTH118, PTH123
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

MAX_FILE = 16 * 2**20  # bytes of one file that it may write

# System calls by number. All but those of `_CHECKED` pass, whatever their arguments: an interpreter that computes needs
# no other. What is not listed fails with EPERM, also what a later kernel adds.
_CHECKED = {"kill", "tgkill", "clone", "clone3", "prlimit64", "ioctl", "fcntl", "sendto", "capset", "mmap"}
_CHECKED |= {"open", "openat"}
_X86_64 = """
read=0 write=1 readv=19 writev=20 pread64=17 pwrite64=18 close=3 close_range=436 stat=4 fstat=5 lstat=6 newfstatat=262
statx=332 lseek=8 getdents64=217 getcwd=79 chdir=80 access=21 faccessat=269 faccessat2=439 readlink=89 readlinkat=267
dup=32 dup2=33 dup3=292 pipe=22 pipe2=293 unlink=87 unlinkat=263 rename=82 renameat=264 renameat2=316 mkdir=83
mkdirat=258 rmdir=84 ftruncate=77 flock=73 fsync=74 fdatasync=75 umask=95 fadvise64=221 munmap=11 mprotect=10 mremap=25
brk=12 madvise=28 membarrier=324 mincore=27 futex=202 set_robust_list=273 rseq=334 gettid=186 exit=60 exit_group=231
sched_yield=24 sched_getaffinity=204 sched_getparam=143 sched_getscheduler=145 set_tid_address=218 arch_prctl=158
sigaltstack=131 rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 rt_sigpending=127 rt_sigtimedwait=128
rt_sigsuspend=130 pause=34 restart_syscall=219 clock_gettime=228 clock_getres=229 clock_nanosleep=230 nanosleep=35
gettimeofday=96 time=201 times=100 setitimer=38 getitimer=36 alarm=37 getrusage=98 select=23 pselect6=270 poll=7
ppoll=271 epoll_create=213 epoll_create1=291 epoll_ctl=233 epoll_wait=232 epoll_pwait=281 eventfd=284 eventfd2=290
socketpair=53 recvfrom=45 shutdown=48 getsockopt=55 getpid=39 getppid=110 getuid=102 geteuid=107 getgid=104 getegid=108
getgroups=115 getresuid=118 getresgid=120 getpgrp=111 uname=63 sysinfo=99 getrandom=318 getrlimit=97 getcpu=309 kill=62
tgkill=234 clone=56 clone3=435 prlimit64=302 ioctl=16 fcntl=72 sendto=44 capset=126 open=2 openat=257 mmap=9
"""
_AARCH64 = """
read=63 write=64 readv=65 writev=66 pread64=67 pwrite64=68 close=57 close_range=436 fstat=80 newfstatat=79 statx=291
lseek=62 getdents64=61 getcwd=17 chdir=49 faccessat=48 faccessat2=439 readlinkat=78 dup=23 dup3=24 pipe2=59 unlinkat=35
renameat=38 renameat2=276 mkdirat=34 ftruncate=46 flock=32 fsync=82 fdatasync=83 umask=166 fadvise64=223 munmap=215
mprotect=226 mremap=216 brk=214 madvise=233 membarrier=283 mincore=232 futex=98 set_robust_list=99 rseq=293 gettid=178
exit=93 exit_group=94 sched_yield=124 sched_getaffinity=123 sched_getparam=121 sched_getscheduler=120 set_tid_address=96
sigaltstack=132 rt_sigaction=134 rt_sigprocmask=135 rt_sigreturn=139 rt_sigpending=136 rt_sigtimedwait=137
rt_sigsuspend=133 restart_syscall=128 clock_gettime=113 clock_getres=114 clock_nanosleep=115 nanosleep=101
gettimeofday=169 times=153 setitimer=103 getitimer=102 getrusage=165 pselect6=72 ppoll=73 epoll_create1=20 epoll_ctl=21
epoll_pwait=22 eventfd2=19 socketpair=199 recvfrom=207 shutdown=210 getsockopt=209 getpid=172 getppid=173 getuid=174
geteuid=175 getgid=176 getegid=177 getgroups=158 getresuid=148 getresgid=150 uname=160 sysinfo=179 getrandom=278
getrlimit=163 getcpu=168 kill=129 tgkill=131 clone=220 clone3=435 prlimit64=261 ioctl=29 fcntl=25 sendto=206 capset=91
openat=56 mmap=222
"""
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
_HARMLESS_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # F_DUPFD to F_SETLKW; not F_SETOWN, which sends signals to others
_HARMLESS_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
_CLONE_THREAD = 0x10000
_ENOSYS = 38
_EPERM = 1

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIR = 8
_TRUNCATE = 1 << 14
_CHANGE_DIR = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8  # remove and make directories and regular files
_O_TRUNC = 0o1000
_O_ACCMODE = 3
_MAP_SHARED = 1
_MAP_ANONYMOUS = 0x20
_ALL_FILE_RIGHTS_BY_ABI = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15, 5: 1 << 16}


def isolate(
    folders: list[str], memory_mb: int, cpu_seconds: float, parent: int, libraries: list[str], counted: bool = False
) -> list[str]:
    """Give up all rights but to write in `folders` and read `libraries`, and say which layers hold.

    `counted` says whether its parent counts what it writes.
    """
    holds = ["memory"] if _limit(memory_mb, cpu_seconds) else []
    if sys.platform != "linux":
        return holds
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before this process could ask for the signal
        os._exit(1)
    # What has been written to files is read from /proc, which needs this for the one; nobody needs it for the other.
    libc.prctl(_PR_SET_DUMPABLE, int(counted), 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return holds
    abi, restricted = _restrict_files(libc, folders, libraries)
    calls = _restrict_calls(libc)
    if restricted and (abi >= 3 or calls):  # before the third version, only the filter knows of O_TRUNC
        holds.append("files")
    if calls:
        holds += ["network", "processes"]
    return holds


def _limit(memory_mb: int, cpu_seconds: float) -> bool:
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: MAX_FILE, resource.RLIMIT_NOFILE: 64}
    limits[resource.RLIMIT_CPU] = int(cpu_seconds) + 5
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (least, least))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        limit = now + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (OSError, ValueError):
        return False
    return True


def _restrict_files(libc: Any, folders: Sequence[str], libraries: Sequence[str]) -> tuple[int, bool]:
    """Landlock: read Python's library and the system's, write in `folders` alone, execute nothing. Also its version."""
    abi: int = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return 0, False
    handled = _ALL_FILE_RIGHTS_BY_ABI.get(abi, 1 << 16) - 1
    scoped = 3 if abi >= 6 else 0  # abstract sockets of, and signals to, processes outside
    attributes = struct.pack("=QQQ", handled, 3 if abi >= 4 else 0, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return abi, False
    paths = sysconfig.get_paths()
    read = {paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib"), *libraries}
    read |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache"}
    rules = dict.fromkeys(read | {"/dev/urandom", "/dev/zero"}, _READ_FILE | _READ_DIR)
    rules["/dev/null"] = _READ_FILE | _WRITE_FILE
    rules |= dict.fromkeys(folders, _READ_FILE | _READ_DIR | _WRITE_FILE | _CHANGE_DIR | _TRUNCATE)
    for path, rights in rules.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not every system has each of them
            continue
        allowed = rights & handled & (-1 if os.path.isdir(path) else ~(_READ_DIR | _CHANGE_DIR))
        added = libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, opened), 0)
        os.close(opened)
        if added != 0:
            return abi, False
    restricted = libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return abi, bool(restricted)


def _restrict_calls(libc: Any) -> bool:
    """Drop all capabilities, which root has, and let only the listed system calls pass, by seccomp."""
    if platform.machine() not in _MACHINES or sys.maxsize < 2**32:
        return False
    architecture, listed = _MACHINES[platform.machine()]
    pairs = (entry.split("=") for entry in listed.split())
    numbers = {name: int(number) for name, number in pairs}
    header = struct.pack("=Ii", 0x20080522, 0)
    if libc.syscall(numbers["capset"], header, bytes(24)) != 0:
        return False
    program = _filter_program(architecture, numbers)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    return bool(libc.prctl(_PR_SET_SECCOMP, 2, described, 0, 0) == 0)


_Line = tuple[int, int, int, int]


def _filter_program(architecture: int, numbers: dict[str, int]) -> list[_Line]:
    allow = (0x06, 0, 0, 0x7FFF0000)
    kill = (0x06, 0, 0, 0x80000000)
    refuse = (0x06, 0, 0, 0x50000 | _EPERM)
    absent = (0x06, 0, 0, 0x50000 | _ENOSYS)

    def load(offset: int) -> _Line:
        return 0x20, 0, 0, offset

    def only_if(call: str, tests: list[_Line]) -> list[_Line]:
        """If it is this call: run the tests, which allow, else refuse."""
        return [(0x15, 0, len(tests) + 1, numbers[call]), *tests, refuse]

    def argument_in(index: int, values: Sequence[int]) -> list[_Line]:
        return [load(16 + 8 * index), *(line for value in values for line in ((0x15, 0, 1, value), allow))]

    program = [load(4), (0x15, 1, 0, architecture), kill, load(0), (0x35, 0, 1, 0x40000000), kill]
    for number in (number for name, number in numbers.items() if name not in _CHECKED):
        program += [(0x15, 0, 1, number), allow]
    own = os.getpid()
    program += only_if("kill", argument_in(0, [own])) + only_if("tgkill", argument_in(0, [own]))
    program += only_if("prlimit64", argument_in(0, [0]))
    program += only_if("fcntl", argument_in(1, _HARMLESS_FCNTL)) + only_if("ioctl", argument_in(1, _HARMLESS_IOCTL))
    program += only_if("clone", [load(16), (0x45, 0, 1, _CLONE_THREAD), allow])  # threads, but no processes
    # Only what is opened for writing may be emptied, whatever Landlock knows of that.
    for call, index in (("open", 1), ("openat", 2)):
        masked = [load(16 + 8 * index), (0x54, 0, 0, _O_TRUNC | _O_ACCMODE)]
        empties = [line for mode in (0, 3) for line in ((0x15, 0, 1, _O_TRUNC | mode), refuse)]
        if call in numbers:
            program += only_if(call, [*masked, *empties, allow])
    # What a file holds is written by calls that count; a shared map of one would be a way around them.
    mapped = [load(16 + 8 * 3), (0x54, 0, 0, _MAP_SHARED | _MAP_ANONYMOUS), (0x15, 1, 0, _MAP_SHARED), allow]
    program += only_if("mmap", mapped)
    no_address = [load(48), (0x15, 0, 3, 0), load(52), (0x15, 0, 1, 0), allow]
    program += only_if("sendto", no_address)  # a pair of sockets reaches nobody else without one
    program += [(0x15, 0, 1, numbers["clone3"]), absent]  # its flags are out of a filter's sight; libc uses clone
    return [*program, refuse]
