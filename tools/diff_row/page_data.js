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

/** What a token id reads as. */
function makeTexts(ids, texts) {
  const known = new Map();
  for (let i = 0; i < texts.length; i++) known.set(ids[i], texts[i]);
  return (id) => known.get(id) ?? "";
}

if (typeof module !== "undefined") module.exports = { decodeAll, differenceRuns, neighbourRun, makeTexts, DIFFERS };
