"use strict";
// Reads what the page carries: no drawing here, so that it also runs where there is no document.

const PADDED = 1, BOUNDARY = 64, DIFFERENT = 2 | 4 | 8 | 16 | 32;
const DIFFERS = { input_ids: 2, target_ids: 4, token_mask: 8, position_ids: 16, cu_seqlens: 32 };

/** Inflates base64 of a zlib stream to bytes. */
async function inflate(text) {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** One array by its description; `base` is the array that it is a difference to, if it is one. */
async function decodeArray(described, text, base) {
  const bytes = await inflate(text);
  if (described.type === "json") return JSON.parse(new TextDecoder().decode(bytes));
  if (described.type === "float64") return new Float64Array(bytes.buffer);
  const values = new Int32Array(bytes.buffer);
  if (described.running) for (let i = 1; i < values.length; i++) values[i] += values[i - 1];
  if (described.like) for (let i = 0; i < values.length; i++) values[i] += base[i];
  return values;
}

/** All arrays by name. `blob(name)` gives the base64 of one. */
async function decodeAll(arrays, blob) {
  const decoded = {};
  for (const name of Object.keys(arrays).sort((a, b) => !!arrays[a].like - !!arrays[b].like)) {
    decoded[name] = await decodeArray(arrays[name], blob(name), decoded[arrays[name].like]);
  }
  return decoded;
}

/** Runs of neighbouring positions that differ, as [start, end) pairs. */
function differenceRuns(flags) {
  const runs = [];
  for (let i = 0; i < flags.length; i++) {
    if (!(flags[i] & DIFFERENT)) continue;
    const start = i;
    while (i < flags.length && flags[i] & DIFFERENT) i++;
    runs.push([start, i]);
  }
  return runs;
}

/** The run to go to from a position: the nearest that starts after it, or before it, round the ends of the row. */
function neighbourRun(runs, position, step) {
  if (!runs.length) return -1;
  if (step > 0) {
    const found = runs.findIndex((run) => run[0] > position);
    return found < 0 ? 0 : found;
  }
  for (let i = runs.length - 1; i >= 0; i--) if (runs[i][0] < position) return i;
  return runs.length - 1;
}

/** What a cell says of tensors that differ: each by its short name, with the value of the first side that has another than the shown one. */
function otherValues(arrays, sides, shown, position, names, short, text) {
  const said = names.map((name) => {
    const all = Array.from({ length: sides }, (_, side) => arrays[`${side}.${name}`]?.[position]);
    const other = all.find((value) => !Object.is(value, all[shown]));
    const reads = name === "input_ids" || name === "target_ids" ? text(other) : "";
    return `${short[name] ?? "boundary"}${other === undefined ? "" : ` ${reads || other}`}`;
  });
  return `≠ ${said.join(", ")}`;
}

/** What a token id reads as. */
function makeTexts(ids, texts) {
  const known = new Map();
  for (let i = 0; i < texts.length; i++) known.set(ids[i], texts[i]);
  return (id) => known.get(id) ?? "";
}

/** The row as one text to search in, with the place where each token begins in it. Quotes around a token are its frame, not its text. */
function joinTexts(ids, text) {
  const parts = [], starts = new Int32Array(ids.length);
  let at = 0;
  for (let i = 0; i < ids.length; i++) {
    const shown = text(ids[i]);
    const bare = (shown.length > 1 && shown.startsWith("'") && shown.endsWith("'") ? shown.slice(1, -1) : shown).toLowerCase();
    starts[i] = at;
    parts.push(bare);
    at += bare.length;
  }
  return { joined: parts.join(""), starts };
}

/** The position whose token holds the beginning of the next match behind `position` (before it, if step < 0), round the ends; -1 for none. */
function findText(index, query, position, step) {
  const wanted = query.toLowerCase().replaceAll("\n", "⏎");
  if (!wanted) return -1;
  const { joined, starts } = index;
  let at;
  if (step > 0) {
    at = position + 1 < starts.length ? joined.indexOf(wanted, starts[position + 1]) : -1;
    if (at < 0) at = joined.indexOf(wanted);
  } else {
    at = starts[position] > 0 ? joined.lastIndexOf(wanted, starts[position] - 1) : -1;
    if (at < 0) at = joined.lastIndexOf(wanted);
  }
  if (at < 0) return -1;
  let low = 0, high = starts.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1; if (starts[middle] <= at) low = middle; else high = middle - 1; }
  return low;
}

if (typeof module !== "undefined") module.exports = { decodeAll, differenceRuns, neighbourRun, makeTexts, joinTexts, findText, otherValues, DIFFERS };
