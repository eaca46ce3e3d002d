"""Measuring a folder: where it lies, how fast it is, and how much of it is written meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay import native
from forebay.bench.nvme import NvmeBench, NvmeSpec, bench_nvme
from forebay.bench.nvme_step import NvmeStepBench, NvmeStepSpec
from forebay.bench.peers import _deepspeed_config
from forebay.bench.spec import StepSpec
from forebay.cli.main import main
from forebay.engine.file_space import FileSpace, NvmeOptions
from forebay.errors import ConfigError, StorageError
from forebay.hardware.storage import Storage, storage_of
from forebay.links.direct_storage import DirectStorage
from forebay.probe.drive import Moved
from forebay.probe.folder import DriveProbe, Setting, probe_drive
from forebay.tiers.ledger import Ledger

MIB = 1 << 20

_MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:20 / {root}/net rw - nfs4 server:/home rw
23 21 0:21 / {root}/net/deep/tmp rw - tmpfs tmpfs rw
24 21 0:22 / {root}/with\\040space rw - overlay overlay rw
25 21 0:23 / {root}/user rw - fuse.sshfs host:/ rw
"""


@pytest.fixture
def machine(tmp_path):
    """A proc and a sys of some machine, and folders on its mounts."""
    root = tmp_path / "root"
    for name in ("net/deep/tmp", "with space", "user", "plain", "netto"):
        (root / name).mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(_MOUNTS.format(root=root))
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "kind", "words"),
    [
        ("plain", "ext4", ""),
        ("netto", "ext4", ""),
        ("net", "nfs4", "network or user-space"),
        ("net/deep/tmp", "tmpfs", "host memory"),
        ("with space", "overlay", "a container's own layer"),
        ("user", "fuse.sshfs", "network or user-space"),
    ],
)
def test_the_longest_mount_point_holds_a_folder(machine, folder, kind, words):
    found = storage_of(machine / "root" / folder, proc=machine, sys=machine)
    assert found.kind == kind
    assert found.is_rotating is None
    assert bool(found.warnings()) is bool(words)
    assert words in " ".join(found.warnings())


def test_a_rotating_disk_is_told_also_behind_a_partition(machine):
    import os

    folder = machine / "root" / "plain"
    device = folder.stat().st_dev
    block = machine / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    (machine / "disk" / "queue").mkdir(parents=True)
    (machine / "disk" / "queue" / "rotational").write_text("1\n")
    (machine / "disk" / "part1").mkdir()
    block.parent.mkdir(parents=True)
    block.symlink_to(machine / "disk" / "part1")
    found = storage_of(folder, proc=machine, sys=machine)
    assert found.is_rotating is True
    assert "rotates" in found.warnings()[0]


def _written() -> int:
    """Bytes that this process has sent to block devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def test_a_probe_writes_no_more_than_it_may_and_leaves_nothing(tmp_path):
    told: list[str] = []
    before = _written()
    found = probe_drive(tmp_path, most_bytes=140 * MIB, progress=told.append)
    assert found.written_bytes <= 140 * MIB
    assert _written() - before <= 141 * MIB
    assert list(tmp_path.iterdir()) == []
    assert len(told) == 1 + len(found.settings)
    assert told[1].startswith("1 of 16: blocks of 256.0 KiB, 1 in flight")
    assert all(one.read > 0 and one.write > 0 for one in found.settings)
    assert found.aio["block_size"] % 4096 == 0
    assert found.best in found.settings


def test_too_few_bytes_measure_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"are too few for 16 settings"):
        probe_drive(tmp_path, most_bytes=MIB)
    with pytest.raises(StorageError, match="does not exist"):
        probe_drive(tmp_path / "absent", most_bytes=1 << 30)


def test_nearly_as_fast_with_less_in_flight_is_recommended(tmp_path):
    rates = {(1 << 20, 1): 1.0, (1 << 20, 8): 2.9, (1 << 20, 32): 3.0, (4 << 20, 8): 2.95}
    settings = tuple(
        Setting(block_bytes=block, depth=depth, read=rate, write=rate)
        for (block, depth), rate in rates.items()
    )
    storage = Storage(kind="ext4", source="/dev/nvme0", free_bytes=1, is_rotating=False)
    found = DriveProbe(
        path=tmp_path,
        storage=storage,
        backend="io_uring",
        is_direct=False,
        written_bytes=1,
        settings=settings,
        direct=DirectStorage(library=None, reason="not here"),
    )
    assert (found.aio["block_size"], found.aio["queue_depth"]) == (1 << 20, 8)
    assert found.warnings() == ["there is no direct access here: these rates are the page cache's"]


def test_the_command_prints_a_table_and_the_section(tmp_path, capsys):
    assert main(["probe", "nvme", str(tmp_path), "--most", "140MiB"]) == 0
    out, err = capsys.readouterr()
    assert "<-" in out
    section = json.loads(out[out.index("{") :])
    assert set(section["aio"]) >= {"block_size", "queue_depth", "single_submit", "overlap_events"}
    assert "measuring: 16 of 16" in err
    assert main(["probe", "nvme"]) == 2
    assert main(["probe", "nvme", str(tmp_path), "--most", "100TiB"]) == 1
    assert "hint: lower --most" in capsys.readouterr().err
    assert main(["probe", "disk", str(tmp_path)]) == 2


@pytest.mark.parametrize("verb", ["probe nvme", "probe --drive", "bench nvme --folder"])
@pytest.mark.parametrize("name", ["gone", "file"])
def test_a_folder_that_is_none_is_typed_wrongly(verb, name, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*verb.split(), str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err.splitlines()[0]


def test_state_that_goes_to_memory_is_told(caplog):
    if storage_of(Path("/dev/shm")).kind != "tmpfs":
        pytest.skip("no tmpfs here")
    FileSpace(
        NvmeOptions(paths=(Path("/dev/shm"),)), nbytes=4096, ledger=Ledger(), core=native.core()
    ).close()
    assert "state goes to /dev/shm: tmpfs is host memory: state there saves none" in caplog.text


def test_the_queue_is_timed_beside_a_loop_or_fio(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = bench_nvme(NvmeSpec(path=tmp_path, nbytes=4 * MIB, rounds=2))
    assert {name for name, _ in found.rounds} == {
        "forebay io_uring",
        "forebay threads",
        "a loop",
    }
    assert all(len(runs) == 2 for runs in found.rounds.values())
    assert "| read | a loop |" in found.table().markdown()
    json.dumps(found.as_dict())
    with pytest.raises(ConfigError, match="whole number of blocks"):
        bench_nvme(NvmeSpec(path=tmp_path, nbytes=5000))


def test_ratios_are_taken_within_a_round(tmp_path):
    def moved(rate: float, cpu: float) -> Moved:
        return Moved(nbytes=10**9, seconds=1 / rate, cpu_seconds=cpu, backend="x")

    rounds = {
        (who, action): [moved(rate, 0.05) for rate in rates]
        for action in ("read", "write")
        for who, rates in {"forebay io_uring": (1.0, 3.0), "fio": (2.0, 3.0)}.items()
    }
    table = NvmeBench(spec=NvmeSpec(path=tmp_path), file_system="x", rounds=rounds).table()
    assert table.rows[0] == ("read", "forebay io_uring", "2.00", "0.75", "0.50 - 1.00", "0.050")


def test_a_step_is_set_beside_the_longest_of_three(tmp_path):
    found = NvmeStepBench(
        spec=NvmeStepSpec(path=tmp_path, device="cpu"),
        file_system="x",
        compute=1.0,
        read=4e9,
        write=2e9,
        both=1e9,
        read_bytes=12 * 10**9,
        written_bytes=10 * 10**9,
        steps=(5.0, 6.0, 7.0),
    )
    assert (found.floor, found.mixed_floor) == (5.0, 12.0)
    assert found.table().rows[0][-2:] == ("1.20", "0.50")
    json.dumps(found.as_dict())


@pytest.mark.parametrize(
    ("peer", "failure", "said"),
    [
        ((9.0, 12.0, 12.0), "", "12.000 s (9.000 - 12.000), 2.00 of this"),
        ((), "exit code 1, no libaio", "in files: exit code 1, no libaio"),
    ],
)
def test_a_peer_or_its_failure_stands_below(tmp_path, peer, failure, said):
    found = NvmeStepBench(
        spec=NvmeStepSpec(path=tmp_path, device="cpu", peer_seconds=1),
        file_system="x",
        compute=1.0,
        read=1.0,
        write=1.0,
        both=1.0,
        read_bytes=1,
        written_bytes=1,
        steps=(6.0,),
        peer=peer,
        peer_failure=failure,
    )
    assert said in found.table().notes[-1]
    json.dumps(found.as_dict())


def test_deepspeed_s_files_are_asked_for_as_it_documents():
    spec = StepSpec(variant="deepspeed3nvme", device="cpu", nvme_path="/state")
    offload = _deepspeed_config(spec, 3)["zero_optimization"]["offload_optimizer"]
    assert (offload["device"], offload["nvme_path"]) == ("nvme", "/state")
    assert "offload_param" not in _deepspeed_config(spec, 3)["zero_optimization"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("probe nvme HERE --output HERE/gone/file.json", 2, "lies in a folder that is not there"),
        ("probe --quick --output HERE/gone/file.json", 2, "lies in a folder that is not there"),
        (f"probe --quick --output {'x' * 300}/y", 2, "lies in a folder that is not there"),
        (f"bench nvme --folder HERE --output HERE/file/{'x' * 300}", 2, "file is a file"),
        ("probe --quick --output HERE/file/y", 2, "file, which is a file"),
        ("probe nvme /proc", 1, "cannot make a state file in /proc"),
        ("bench nvme --folder HERE --output HERE/file", 2, "file is a file"),
        ("bench nvme --folder HERE --output HERE/file/below", 2, "file is a file"),
        ("bench nvme --folder /proc", 1, "cannot make a folder in /proc"),
        ("bench checkpoint --folder /proc", 1, "cannot make a folder in /proc"),
        ("bench nvme --folder HERE --size 0B", 2, "0 bytes are no whole number of blocks and MiB"),
        ("bench nvme --folder HERE --block 0B", 2, "a request of 0 bytes cannot be made"),
        ("bench nvme --folder HERE --block 1000B", 2, "a request of 1000 bytes cannot be made"),
        ("bench nvme --folder HERE --depth 1000", 2, "--depth"),
        ("bench nvme-step --folder HERE --block 1000B", 2, "a request of 1000 bytes"),
        ("bench nvme-step --folder /proc", 1, "cannot make a state file in /proc"),
        ("plan 7B --machine 4090 --config HERE/gone/x.json", 2, "in a folder that is not there"),
        ("plan 7B --machine 4090 --config /proc/x.json", 1, "cannot write /proc/x.json"),
    ],
)
def test_a_place_or_size_that_cannot_be_is_one_line_before_anything_is_measured(
    words, code, message, tmp_path, capsys
):
    (tmp_path / "file").touch()
    assert main(words.replace("HERE", str(tmp_path)).split()) == code
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


def test_what_fio_says_when_it_fails_is_told(tmp_path, monkeypatch):
    program = tmp_path / "fio"
    # The size of a trial is one block; only then does it work.
    program.write_text(
        '#!/bin/sh\ncase "$*" in *--size=1048576*) ;; *) echo "full" >&2; exit 1; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(program))
    with pytest.raises(StorageError, match="fio's io_uring cannot write 2097152 bytes: full"):
        bench_nvme(NvmeSpec(path=tmp_path, nbytes=2 * MIB, rounds=1))
