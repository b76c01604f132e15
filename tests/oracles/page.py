"""Frames of the page, literally: bins one after the other, and a decoder that follows the description of the format."""

import gzip
import json
import math
import struct

NAN = math.nan


def bins_of(steps, values, bins):
    """Mean, minimum and maximum of the finite values [steps][layers], in bins: a list of dicts per layer."""
    count = len(steps) if bins is None else min(bins, len(steps))
    found = [[] for _ in values[0]] if values else []
    for i in range(count):
        begin, end = i * len(steps) // count, (i + 1) * len(steps) // count
        for layer, cells in enumerate(found):
            known = [float(row[layer]) for row in values[begin:end] if math.isfinite(row[layer])]
            cells.append({
                "first": int(steps[begin]),
                "last": int(steps[end - 1]),
                "mean": math.fsum(known) / len(known) if known else NAN,
                "min": min(known, default=NAN),
                "max": max(known, default=NAN),
            })  # fmt: skip
    return found


def decode(frame):
    """The header of a frame, and the same lists of dicts."""
    data = gzip.decompress(frame)
    (size,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + size].decode())
    at = 4 + size
    while at % 8:
        assert data[at] == 0
        at += 1
    layers, bins = header["layers"], header["bins"]
    first = struct.unpack_from(f"<{bins}d", data, at)
    last = struct.unpack_from(f"<{bins}d", data, at + 8 * bins)
    at += 16 * bins
    names = ["mean"] if header["exact"] else ["mean", "min", "max"]
    planes = {}
    if header["encoding"] == "float32":
        for name in names:
            planes[name] = struct.unpack_from(f"<{layers * bins}f", data, at)
            at += 4 * layers * bins
    else:
        stored = []
        for _ in names:
            low, high = data[at : at + layers * bins], data[at + layers * bins : at + 2 * layers * bins]
            stored.append([a + 256 * b for a, b in zip(low, high, strict=True)])
            at += 2 * layers * bins
        means = []
        for layer in range(layers):
            code = 0
            for change in stored[0][layer * bins : (layer + 1) * bins]:
                code = (code + change) % 65536
                means.append(code)
        codes = {"mean": means}
        if not header["exact"]:
            codes["min"] = [mean - less for mean, less in zip(means, stored[1], strict=True)]
            codes["max"] = [mean + more for mean, more in zip(means, stored[2], strict=True)]
        planes = {name: [_value(code, header) for code in its] for name, its in codes.items()}
    assert at == len(data)
    cells = [
        {"first": first[t], "last": last[t], **{name: plane[layer * bins + t] for name, plane in planes.items()}}
        for layer in range(layers)
        for t in range(bins)
    ]
    for cell in cells:
        cell.setdefault("min", cell["mean"])
        cell.setdefault("max", cell["mean"])
    return header, [cells[layer * bins : (layer + 1) * bins] for layer in range(layers)]


def _value(code, header):
    assert 0 <= code <= 4095
    if code == 0:
        return NAN
    share = (code - 1) / 4094
    low, high = header["low"], header["high"]
    return low * (high / low) ** share if header["scale"] == "log" else low + share * (high - low)
