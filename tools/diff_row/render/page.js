"use strict";
// Draws the cells that are in view, and nothing else: a row of 262,144 tokens is one canvas and one scroll bar.

const element = (id) => document.getElementById(id);
const view = element("view"), cells = element("cells"), map = element("map"), tip = element("tip"), fields = element("fields");
const whole = JSON.parse(element("facts").textContent);
let facts = whole.views ? whole.views[whole.shown] : whole, length = facts.length;
const SHORT = { input_ids: "token", target_ids: "label", token_mask: "mask", position_ids: "position" };
const SIZES = { text: { narrowest: 92, width: 0, height: 36, gutter: 62 }, small: { narrowest: 12, width: 0, height: 12, gutter: 62 } };
let arrays, text, runs, colours, size = SIZES.text, columns = 8, cursor = 0, shownSide = 0, hovered = -1, mapped = null, searched = null;

const value = (side, tensor, position) => arrays[`${side}.${tensor}`][position];
const differs = (position) => arrays.flags[position] & DIFFERENT;

async function load() {
  arrays = await decodeAll(facts.arrays, (name) => element(`data-${facts.prefix ?? ""}${name}`).textContent);
  text = makeTexts(arrays.text_ids, arrays.texts);
  runs = differenceRuns(arrays.flags);
}

async function start() {
  try {
    await load();
  } catch (error) {
    fields.textContent = `This browser cannot read the row (${error}). It needs DecompressionStream: any of 2023 or later.`;
    return;
  }
  // On a narrow screen the notes would stand between the reader and the row.
  if (matchMedia("(max-width: 900px)").matches) document.querySelector("#notes")?.removeAttribute("open");
  readColours();
  listen();
  arrange();
  if (!goToHash()) goTo(runs.length ? runs[0][0] : 0);
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours = new Proxy({}, { get: (known, name) => (known[name] ??= style.getPropertyValue(`--${name}`).trim()) });
}

function listen() {
  addEventListener("resize", arrange);
  addEventListener("hashchange", goToHash);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); arrange(); });
  view.addEventListener("scroll", () => { hideTip(); requestAnimationFrame(draw); });
  cells.addEventListener("mousemove", (event) => hover(positionAt(event), event));
  cells.addEventListener("mouseleave", hideTip);
  cells.addEventListener("click", (event) => { const at = positionAt(event); if (at >= 0) select(at); });
  for (const kind of ["pointerdown", "pointermove"]) map.addEventListener(kind, (event) => {
    if (kind === "pointerdown" || event.buttons) goTo(Math.floor(event.offsetX / map.clientWidth * length));
  });
  element("next").addEventListener("click", () => step(1));
  element("previous").addEventListener("click", () => step(-1));
  element("position").addEventListener("change", (event) => goTo(Number(event.target.value)));
  element("conversation").addEventListener("change", (event) => {
    const found = facts.conversations[Number(event.target.value)];
    if (found) goTo(found[0]);
  });
  element("side").addEventListener("change", (event) => { shownSide = Number(event.target.value); draw(); });
  element("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { search(event.shiftKey ? -1 : 1); event.preventDefault(); }
  });
  element("find").addEventListener("input", () => { element("found").textContent = ""; });
  element("zoom").addEventListener("change", (event) => { size = SIZES[event.target.value]; arrange(); goTo(cursor); });
  document.addEventListener("keydown", press);
  // Only a page of several steps has this one.
  document.querySelector("#step")?.addEventListener("change", (event) => change(Number(event.target.value)));
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  if (event.key === "n") step(1);
  else if (event.key === "p") step(-1);
  else if (event.key === "g") element("position").select();
  else if (event.key === "/") element("find").select();
  else if (document.activeElement === view && event.key in moves) goTo(cursor + moves[event.key]);
  else if (document.activeElement === view && event.key === "Home") goTo(0);
  else if (document.activeElement === view && event.key === "End") goTo(length - 1);
  else return;
  event.preventDefault();
}

function step(direction) {
  const run = neighbourRun(runs, cursor, direction);
  if (run >= 0) goTo(runs[run][0]);
}

/** Goes to the next place at which the shown side's tokens read as what stands in the field, from the cursor on. */
function search(direction) {
  if (searched?.facts !== facts || searched.side !== shownSide) {
    searched = { facts, side: shownSide, index: joinTexts(arrays[`${shownSide}.input_ids`], text) };
  }
  const at = findText(searched.index, element("find").value, cursor, direction);
  element("found").textContent = at >= 0 || !element("find").value ? "" : "not in this row";
  if (at >= 0) goTo(at);
}

function goToHash() {
  const found = /^#p(\d+)$/.exec(location.hash);
  if (found) { goTo(Number(found[1])); view.scrollIntoView({ block: "nearest" }); }
  return !!found;
}

/** Shows another step of the way, at the same position of the row where that step has it. */
async function change(number) {
  const before = arrays.origin ? arrays.origin[cursor] : cursor;
  facts = whole.views[number];
  length = facts.length;
  await load();
  hovered = -1;
  shownSide = Math.min(shownSide, facts.sides.length - 1);
  element("side").replaceChildren(...facts.sides.map((side, n) => new Option(`${side.letter} ${side.name}`, n, n === shownSide, n === shownSide)));
  element("position").max = length - 1;
  for (const section of document.querySelectorAll(".of-step")) section.hidden = number !== whole.shown;
  view.scrollTop = 0;
  arrange();
  const at = arrays.origin ? arrays.origin.indexOf(before) : before;
  goTo(at >= 0 && at < length ? at : 0);
}

/** Selects a position and scrolls it into the middle of the view if it is not in it. */
function goTo(position) {
  if (!Number.isFinite(position)) return;
  const at = Math.max(0, Math.min(length - 1, Math.floor(position)));
  const top = Math.floor(at / columns) * size.height;
  if (top < view.scrollTop || top + size.height > view.scrollTop + view.clientHeight) {
    view.scrollTop = top - view.clientHeight / 2 + size.height;
  }
  select(at);
}

function select(position) {
  cursor = position;
  element("position").value = position;
  const at = arrays.conversation_at[position];
  element("conversation").value = at;
  const run = runs.findIndex((found) => found[0] <= position && position < found[1]);
  const count = runs.length === 1 ? "1 run of differences" : `${runs.length.toLocaleString("en")} runs of differences`;
  element("run").textContent = !runs.length ? "no difference" : run < 0 ? count : `difference ${run + 1} of ${runs.length}, ` +
    (runs[run][1] - runs[run][0] === 1 ? `position ${runs[run][0]}` : `positions ${runs[run][0]}–${runs[run][1] - 1}`);
  fields.replaceChildren(...describe(position));
  draw();
}

/** Columns to the width there is, a round number of them where there is room, so that positions are easy to count. */
function arrange() {
  const width = view.clientWidth - size.gutter - 2;
  const fit = Math.max(1, Math.floor(width / size.narrowest));
  const unit = size === SIZES.small ? 16 : fit >= 8 ? 4 : 1;
  columns = Math.max(1, fit - fit % unit);
  size.width = size === SIZES.small ? size.narrowest : Math.min(150, Math.floor(width / columns));
  element("space").style.height = `${Math.ceil(length / columns) * size.height}px`;
  mapped = null;
  draw();
}

function prepare(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function draw() {
  const height = Math.min(view.clientHeight, Math.ceil(length / columns) * size.height);
  const context = prepare(cells, view.clientWidth, height);
  context.fillStyle = colours.back;
  context.fillRect(0, 0, view.clientWidth, height);
  const first = Math.floor(view.scrollTop / size.height);
  const last = Math.ceil((view.scrollTop + height) / size.height);
  for (let row = first; row <= last && row * columns < length; row++) {
    const y = row * size.height - view.scrollTop;
    if (size === SIZES.text || row % 2 === 0) {
      context.fillStyle = colours.faint;
      context.font = "11px ui-monospace, 'Noto Sans Mono', monospace";
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(String(row * columns), size.gutter - 8, y + size.height / 2);
    }
    for (let column = 0; column < columns && row * columns + column < length; column++) {
      drawCell(context, row * columns + column, size.gutter + column * size.width, y);
    }
  }
  drawMap();
}

function fillOf(position) {
  if (arrays.flags[position] & PADDED) return colours.padded;
  const hue = arrays.conversation_at[position] % 2;
  return colours[`${value(shownSide, "token_mask", position) ? "trained" : "masked"}-${hue}`];
}

function drawCell(context, position, x, y) {
  const gap = size === SIZES.text ? 2 : 1, width = size.width - gap, height = size.height - gap;
  const flags = arrays.flags[position], different = flags & DIFFERENT;
  context.fillStyle = different && size === SIZES.small ? colours.differs : fillOf(position);
  context.fillRect(x, y, width, height);
  if (flags & PADDED && size === SIZES.text && !different) hatch(context, x, y, width, height);
  if (different && size === SIZES.text) {
    context.fillStyle = colours["differs-back"];
    context.fillRect(x, y + height / 2, width, height / 2);
    context.strokeStyle = colours.differs;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, width - 2, height - 2);
  }
  if (flags & BOUNDARY) {
    context.fillStyle = colours.boundary;
    context.fillRect(x - gap, y - (size === SIZES.text ? 1 : 0), size === SIZES.text ? 3 : 2, height + gap);
  }
  if (size === SIZES.text) drawTexts(context, position, x + 6, y, width - 10, height);
  if (position === cursor || position === hovered) {
    context.strokeStyle = colours.cursor;
    context.lineWidth = position === cursor ? 3 : 1.5;
    context.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
  }
}

function drawTexts(context, position, x, y, width, height) {
  const mono = "ui-monospace, 'Noto Sans Mono', monospace";
  const special = (reads) => !reads.startsWith("'");
  const id = value(shownSide, "input_ids", position), label = value(shownSide, "target_ids", position);
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.direction = "ltr";
  context.fillStyle = arrays.flags[position] & PADDED ? colours.faint : colours.ink;
  const names = Object.keys(DIFFERS).filter((name) => arrays.flags[position] & DIFFERS[name]);
  const trains = value(shownSide, "token_mask", position);
  const reads = id === undefined ? "" : text(id) || String(id);
  context.font = `${special(reads) ? "italic " : ""}12px ${mono}`;
  context.fillText(clipped(context, reads, width), x, names.length || trains ? y + 10 : y + height / 2);
  context.font = `11px ${mono}`;
  if (names.length) {
    context.fillStyle = colours.differs;
    context.fillText(clipped(context, otherValues(arrays, facts.sides.length, shownSide, position, names, SHORT, text), width), x, y + height - 8);
  } else if (trains) {
    context.globalAlpha = 0.72;
    context.fillText(clipped(context, `→ ${text(label) || label}`, width), x, y + height - 8);
  }
  context.restore();
}

/** The text with an ellipsis where it is too wide. */
function clipped(context, reads, width) {
  if (context.measureText(reads).width <= width) return reads;
  const characters = [...reads];
  while (characters.length && context.measureText(`${characters.join("")}…`).width > width) characters.pop();
  return `${characters.join("")}…`;
}

function hatch(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colours["padded-line"];
  context.lineWidth = 1;
  context.globalAlpha = 0.55;
  context.beginPath();
  for (let at = -height; at < width; at += 8) { context.moveTo(x + at, y + height); context.lineTo(x + at + height, y); }
  context.stroke();
  context.restore();
}

/** The whole row in one strip, painted once for each width; each draw only adds where the view is. */
function drawMap() {
  const width = map.clientWidth, height = 44;
  if (!mapped || mapped.cssWidth !== width) {
    mapped = document.createElement("canvas");
    mapped.cssWidth = width;
    paintStrip(prepare(mapped, width, height), width, height);
  }
  const context = prepare(map, width, height);
  map.style.width = "100%";
  context.drawImage(mapped, 0, 0, width, height);
  const from = Math.floor(view.scrollTop / size.height) * columns;
  const shown = Math.ceil(view.clientHeight / size.height) * columns;
  context.strokeStyle = colours.cursor;
  context.lineWidth = 2;
  context.strokeRect(from / length * width, 1, Math.max(3, Math.min(shown, length) / length * width), height - 2);
}

function paintStrip(context, width, height) {
  context.fillStyle = colours.back;
  context.fillRect(0, 0, width, height);
  const marks = [];
  for (let x = 0; x < width; x++) {
    const from = Math.floor(x / width * length), to = Math.max(from + 1, Math.floor((x + 1) / width * length));
    let trained = 0, padded = 0, different = false;
    for (let i = from; i < to; i++) {
      if (arrays.flags[i] & PADDED) padded++;
      else if (value(0, "token_mask", i)) trained++;
      if (arrays.flags[i] & DIFFERENT) different = true;
    }
    const hue = arrays.conversation_at[from] % 2, count = to - from;
    context.fillStyle = padded * 2 > count ? colours.padded : colours[`masked-${hue}`];
    context.fillRect(x, 8, 1, height - 8);
    const high = Math.round(trained / count * (height - 8));
    context.fillStyle = colours[`trained-${hue}`];
    context.fillRect(x, height - high, 1, high);
    if (different) marks.push(x);
  }
  context.fillStyle = colours.differs;
  for (const x of marks) context.fillRect(x - 1, 0, 3, 8);
  context.globalAlpha = 0.35;
  for (const x of marks) context.fillRect(x, 8, 1, height - 8);
  context.globalAlpha = 1;
}

function positionAt(event) {
  const column = Math.floor((event.offsetX - size.gutter) / size.width);
  const row = Math.floor((event.offsetY + view.scrollTop) / size.height);
  const position = row * columns + column;
  return column >= 0 && column < columns && position < length ? position : -1;
}

function hover(position, event) {
  if (position !== hovered) {
    hovered = position;
    requestAnimationFrame(draw);
    if (position >= 0) tip.replaceChildren(...describe(position));
  }
  tip.hidden = position < 0;
  if (position < 0) return;
  const right = event.clientX + 18 + tip.offsetWidth < innerWidth;
  tip.style.left = `${right ? event.clientX + 18 : Math.max(4, event.clientX - tip.offsetWidth - 12)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

function hideTip() {
  tip.hidden = true;
  if (hovered >= 0) { hovered = -1; requestAnimationFrame(draw); }
}

function make(kind, content, className) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  made.append(...[content].flat());
  return made;
}

/** What there is to say about a position, as nodes; texts only ever become text. */
function describe(position) {
  const conversation = arrays.conversation_at[position], turn = arrays.turn_at[position];
  const roles = facts.conversations[conversation]?.[2] ?? [];
  const place = arrays.flags[position] & PADDED ? `conversation ${conversation}, padding` :
    `conversation ${conversation}${turn >= 0 ? `, turn ${turn} (${roles[turn] ?? "?"})` : ""}`;
  const id = value(shownSide, "input_ids", position);
  const where = arrays.origin ? `place ${position.toLocaleString("en")} = position ${arrays.origin[position].toLocaleString("en")} of the row` :
    `position ${position.toLocaleString("en")}`;
  const nodes = [make("div", where, "at"), make("div", place, "place"),
    make("div", make("bdi", id === undefined ? "" : text(id) || String(id)), "big")];
  const table = make("table", []);
  for (const tensor of facts.tensors) {
    const groups = new Map();
    facts.sides.forEach((side, number) => {
      const found = value(number, tensor, position);
      groups.set(found, [...(groups.get(found) ?? []), side.name]);
    });
    for (const [found, names] of groups) {
      const cell = make("td", make("b", found === undefined ? "–" : String(found)), groups.size > 1 ? "different" : "");
      const reads = tensor === "input_ids" || tensor === "target_ids" ? text(found) : "";
      if (reads) cell.append(" ", make("span", make("bdi", reads), "token"));
      if (groups.size > 1) cell.append(make("div", names.join(" = "), "who"));
      table.append(make("tr", [make("th", SHORT[tensor]), cell]));
    }
  }
  nodes.push(table);
  const before = facts.sides.filter((_, side) => facts.boundaries[side].includes(position)).map((side) => side.name);
  if (before.length) {
    nodes.push(make("div", `boundary before this position${before.length < facts.sides.length ? ` only in ${before.join(", ")}` : ""}`));
  }
  return nodes;
}

start();
