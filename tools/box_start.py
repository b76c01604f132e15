"""The receiving end of `pack_for_gpu`: checks the packs, unpacks them and starts training.

`pack_for_gpu` writes this file into `start.sh`, so it needs nothing but Python 3.11 and numpy.

Photographs are packed without loss. Green, red − green and blue − green are predicted from the pixels to the left,
above and above left, by the median edge detector of JPEG-LS (Weinberger, Seroussi and Sapiro, 2000, equation 1). The
errors are sorted by how large the errors and differences around them are, into 16 contexts per channel, each of which
has a Huffman code of its own. CIFAR-10 takes 93 MB so, instead of 184 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shlex
import struct
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 32
PIXELS = 3 * SIDE * SIDE
# Images that are packed at a time: the arrays of one block take about 150 MB.
BLOCK = 10_000
# The contexts of an error are separated by these activities, each of which ends about a 16th of the pixels of CIFAR.
LIMITS = np.array([2, 5, 8, 11, 14, 18, 22, 27, 33, 40, 50, 65, 88, 125, 190], dtype=np.int16)


def encode_images(content: bytes, labels: int) -> bytes:
    """Pack records of `labels` bytes and a photograph of 3 × 32 × 32 bytes, as CIFAR's binary files have them."""
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, labels + PIXELS)
    parts = [struct.pack("<II", labels, len(records))]
    for start in range(0, len(records), BLOCK):
        block = records[start : start + BLOCK]
        streams = [[bytearray() for _ in range(len(LIMITS) + 1)] for _ in range(3)]
        red, green, blue = block[:, labels:].reshape(-1, 3, SIDE, SIDE).transpose(1, 2, 3, 0).astype(np.int16)
        planes = np.ascontiguousarray(np.stack([green, _signed(red - green), _signed(blue - green)], axis=2))
        sizes = np.zeros_like(planes)
        for i, j, predicted, contexts in _walk(planes, sizes):
            errors = _signed(planes[i, j] - predicted)
            sizes[i, j] = np.abs(errors)
            for channel in range(3):
                order, counts = _sorted(contexts[channel])
                source = BytesIO(errors[channel].astype(np.uint8)[order].tobytes())
                for stream, count in zip(streams[channel], counts, strict=True):
                    stream += source.read(count)
        for stream in [block[:, :labels].tobytes(), *(one for channel in streams for one in channel)]:
            coder = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
            packed = coder.compress(stream) + coder.flush()
            parts += [struct.pack("<I", len(packed)), packed]
    return b"".join(parts)


def decode_images(packed: bytes) -> bytes:
    """Return what `encode_images` was given."""
    source = BytesIO(packed)
    labels, many = struct.unpack("<II", source.read(8))
    blocks = []
    for start in range(0, many, BLOCK):
        n = min(BLOCK, many - start)
        each = len(LIMITS) + 1
        own, *streams = (
            zlib.decompress(source.read(*struct.unpack("<I", source.read(4)))) for _ in range(1 + 3 * each)
        )
        by_channel = [list(map(BytesIO, streams[k * each : (k + 1) * each])) for k in range(3)]
        planes = np.zeros((SIDE, SIDE, 3, n), dtype=np.int16)
        sizes = np.zeros_like(planes)
        errors = np.zeros((3, n), dtype=np.int16)
        for i, j, predicted, contexts in _walk(planes, sizes):
            for channel in range(3):
                order, counts = _sorted(contexts[channel])
                pieces = [stream.read(count) for stream, count in zip(by_channel[channel], counts, strict=True)]
                errors[channel, order] = np.frombuffer(b"".join(pieces), dtype=np.int8)
            sizes[i, j] = np.abs(errors)
            planes[i, j, 0] = (predicted[0] + errors[0]) & 255
            planes[i, j, 1:] = _signed(predicted[1:] + errors[1:])
        green, red, blue = planes.transpose(2, 3, 0, 1)
        images = np.stack([red + green, green, blue + green], axis=1).astype(np.uint8).reshape(n, PIXELS)
        blocks.append(np.concatenate([np.frombuffer(own, dtype=np.uint8).reshape(n, labels), images], axis=1).tobytes())
    return b"".join(blocks)


def _walk(planes: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Yield each pixel's place, the prediction of its channels in all images, and the contexts of the errors.

    Both come from the pixels and the sizes of errors before it, which the caller has filled in by then.
    """
    zero = np.zeros_like(planes[0, 0])
    for i in range(SIDE):
        for j in range(SIDE):
            left = planes[i, j - 1] if j else planes[i - 1, 0] if i else zero
            up = planes[i - 1, j] if i else left
            corner = planes[i - 1, j - 1] if i and j else up
            right = planes[i - 1, j + 1] if i and j + 1 < SIDE else up
            low, high = np.minimum(left, up), np.maximum(left, up)
            predicted = np.clip(left + up - corner, low, high)
            activity = np.abs(left - corner) + np.abs(corner - up) + np.abs(up - right)
            if j:
                activity += 2 * sizes[i, j - 1]
            if i:
                activity += 2 * sizes[i - 1, j] + sizes[i - 1, j - (j > 0)] + sizes[i - 1, j + (j + 1 < SIDE)]
            yield i, j, predicted, np.searchsorted(LIMITS, activity).astype(np.uint8)


def _sorted(contexts: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return the images in the order of their contexts, and how many each context has."""
    return np.argsort(contexts, kind="stable"), np.bincount(contexts, minlength=len(LIMITS) + 1).tolist()


def _signed(values: np.ndarray) -> np.ndarray:
    """Return the same numbers modulo 256, from -128 to 127."""
    return ((values + 128) & 255) - 128


def digest(content: bytes) -> str:
    """Return the SHA-256 checksum."""
    return hashlib.sha256(content).hexdigest()


def unpack(manifest: dict[str, Any], packs: dict[str, Path], work: Path) -> None:
    """Write the packed files to the folder `work`, except those of trainings that may have gone on there since."""
    complete = work / "unpacked"
    trained = {path.parent for path in work.glob("runs/lab/*/*/*")} if complete.exists() else set()
    for item in manifest["items"]:
        files = item["files"]
        if (work / item["name"]).parent in trained or all(_is_there(work, file) for file in files):
            continue
        content = b"".join(_part(packs[part["pack"]], part["member"]) for part in item["parts"])
        if item["coding"] == "images":
            content = decode_images(content)
        elif item["coding"] in ("xz", "tar.xz"):
            content = lzma.decompress(content)
        if item["coding"] == "tar.xz":
            with tarfile.open(fileobj=BytesIO(content)) as tar:
                for file in files:
                    _write(work, file, tar.extractfile(file["path"]).read())
        else:
            _write(work, files[0], content)
    complete.touch()


def _is_there(work: Path, file: dict[str, Any]) -> bool:
    path = work / file["path"]
    return path.is_file() and path.stat().st_size == file["size"] and digest(path.read_bytes()) == file["sha256"]


def _part(pack: Path, member: str) -> bytes:
    with tarfile.open(pack) as tar:
        return tar.extractfile(member).read()


def _write(work: Path, file: dict[str, Any], content: bytes) -> None:
    if digest(content) != file["sha256"]:
        sys.exit(f"start.sh: {file['path']} was not unpacked as it was packed. Pack it again with --codec plain.")
    path = work / file["path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.replace(path)


def find(manifest: dict[str, Any], folders: list[Path]) -> dict[str, Path]:
    """Return where each pack is; end the program if one is missing or damaged."""
    found, wrong = {}, []
    for pack in manifest["packs"]:
        there = [folder / pack["name"] for folder in folders if (folder / pack["name"]).is_file()]
        whole = [path for path in there if digest(path.read_bytes()) == pack["sha256"]]
        if whole:
            found[pack["name"]] = whole[0]
        elif there:
            size = there[0].stat().st_size
            how = "another checksum" if size == pack["size"] else f"{size:,} of {pack['size']:,} bytes"
            wrong.append(f"{there[0]} is damaged ({how}): upload it again")
        else:
            wrong.append(f"{pack['name']} is missing: upload it ({pack['size']:,} bytes)")
    if wrong:
        looked = ", ".join(map(str, folders))
        sys.exit(
            "\n".join(["start.sh: not all packs are there.", *(f"  {one}" for one in wrong), f"Looked in {looked}."])
        )
    return found


def main(listed: str, here: str, arguments: list[str]) -> None:
    """Check and unpack the packs, and replace this process by `gyroscope reproduce`.

    Args:
        listed: the manifest, as JSON.
        here: the folder of start.sh.
        arguments: those of start.sh.
    """
    began, manifest = time.monotonic(), json.loads(listed)
    parser = argparse.ArgumentParser(
        "start.sh", description="Unpack Gyroscope and train the trials of its queue until the time is over."
    )
    parser.add_argument("folders", nargs="*", type=Path, help="folders with packs, besides that of start.sh")
    parser.add_argument(
        "--minutes", type=float, default=manifest["minutes"], help="in all, with unpacking (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for the archive of results ($OUT)"
    )
    parser.add_argument("--work", type=Path, default=Path("gyroscope-box"), help="folder to unpack to (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="check and unpack, and print the command")
    given = parser.parse_args(arguments)
    packs = find(manifest, list(dict.fromkeys(path.resolve() for path in [*given.folders, Path(here)])))
    work, out = given.work.resolve(), given.out.resolve()
    unpack(manifest, packs, work)
    out.mkdir(parents=True, exist_ok=True)
    archive = out / f"box-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar"
    minutes = given.minutes - (time.monotonic() - began) / 60
    print(f"start.sh: unpacked to {work}; {minutes:.1f} of {given.minutes:g} minutes are left to train", flush=True)
    if minutes <= 0:
        sys.exit("start.sh: no time is left to train. Start it again; what is unpacked stays.")
    command = [sys.executable, "-m", "gyroscope_lab", "reproduce", *manifest["names"], "--minutes", f"{minutes:.3f}"]
    command += ["--data", "data", "--runs", "runs/lab", "--archive", str(archive)]
    sources = [str(work / folder) for folder in ("src", "lab/src")]
    path = os.pathsep.join(filter(None, [*sources, os.environ.get("PYTHONPATH")]))
    if given.dry_run:
        print(f"cd {shlex.quote(str(work))} && PYTHONPATH={shlex.quote(path)} {shlex.join(command)}")
        return
    os.chdir(work)
    sys.stdout.flush()
    # In this process, so that signals reach the training, which then saves what it has.
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
