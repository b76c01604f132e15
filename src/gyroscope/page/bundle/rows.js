// Rows of the heatmap: layers, grouped by the dots in their names. A group is a stretch of neighboring layers with the
// same beginning of their names; folded, it is one row.

// Return the outermost groups: {from, to, name, depth, children}, layers from `from` up to, not including, `to`.
function groupLayers(names) {
  const parts = names.map((name) => name.split("."));
  function within(from, to, dots, depth) {
    const groups = [];
    for (let a = from; a < to; ) {
      let b = a + 1;
      const named = parts[a].length > dots + 1;
      while (named && b < to && parts[b].length > dots + 1 && parts[b][dots] === parts[a][dots]) b++;
      if (b - a === to - from) return dots < 12 ? within(from, to, dots + 1, depth) : [];
      if (b - a > 1) groups.push({ from: a, to: b, depth, name: parts[a].slice(0, dots + 1).join("."), children: within(a, b, dots + 1, depth + 1) });
      a = b;
    }
    return groups;
  }
  return names.length > 1 ? within(0, names.length, 0, 0) : [];
}

const groupKey = (group) => `${group.from}-${group.to}`;

function everyGroup(groups, found = []) {
  for (const group of groups) {
    found.push(group);
    everyGroup(group.children, found);
  }
  return found;
}

// Return the rows {from, to, group}, where `group` is null for a layer on its own.
function rowsOf(layers, groups, folded) {
  const rows = [];
  const plain = (from, to) => {
    for (let l = from; l < to; l++) rows.push({ from: l, to: l + 1, group: null });
  };
  function walk(from, to, inside) {
    let at = from;
    for (const group of inside) {
      plain(at, group.from);
      if (folded.has(groupKey(group))) rows.push({ from: group.from, to: group.to, group });
      else walk(group.from, group.to, group.children);
      at = group.to;
    }
    plain(at, to);
  }
  walk(0, layers, groups);
  return rows;
}

// Values of rows from values of layers: [rows × bins]. The mean over a folded row's layers, their smallest or largest.
function rowValues(frame, rows, which = "mean") {
  const { bins } = frame;
  if (rows.length === frame.layers) return frame[which];
  const source = frame[which];
  const out = new Float32Array(rows.length * bins);
  rows.forEach(({ from, to }, r) => {
    if (to === from + 1) return out.set(source.subarray(from * bins, to * bins), r * bins);
    for (let t = 0; t < bins; t++) out[r * bins + t] = gather(source, bins, from, to, t, which);
  });
  return out;
}

function gather(values, bins, from, to, t, which) {
  let result = which === "mean" ? 0 : which === "min" ? Infinity : -Infinity;
  let known = 0;
  for (let l = from; l < to; l++) {
    const v = values[l * bins + t];
    if (v !== v) continue;
    known++;
    if (which === "mean") result += v;
    else if (which === "min" ? v < result : v > result) result = v;
  }
  return known ? (which === "mean" ? result / known : result) : NaN;
}

// Names without an ending that all share (".weight"), cleaned.
function shortNames(names) {
  const ending = names.length > 1 ? /\.[^.]+$/.exec(names[0])?.[0] : null;
  const shared = ending && names.every((name) => name.endsWith(ending) && name.length > ending.length);
  return names.map((name) => clean(shared ? name.slice(0, -ending.length) : name));
}

const rowName = (row, names) => (row.group ? `${clean(row.group.name)} (mean over ${row.to - row.from} layers)` : clean(names[row.from]));
