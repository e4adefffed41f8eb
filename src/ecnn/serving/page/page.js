"use strict";

// The page of `ecnn serve`: a picture goes to /v1/predict and /v1/attack, and what comes back is shown.

const find = (id) => document.getElementById(id);
const MOST_ROWS = 12; // codewords that are shown; of more, the most probable
const SPANS = { linf: 0.5, l2: 4, l1: 30 }; // what the slider reaches, by norm
const SIDE = 10; // of a bit, in units of its drawing

const state = { about: null, picture: null, before: null, attack: null, rival: null, turn: 0 };

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function drawn(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1)} %`;
const short = (value) => Number(value.toPrecision(3)).toString();
const counted = (count, one, several) => `${count} ${count === 1 ? one : several}`;
const best = (answer) => answer.guesses[0];

// Asking the server

async function ask(path, body) {
  let answer;
  try {
    answer = await fetch(path, body && {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
  } catch (error) {
    throw new Error("The server does not answer: is it still running?");
  }
  const found = await answer.json().catch(() => ({ error: `The server answered ${answer.status}.` }));
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function complain(error) {
  find("problem").textContent = error ? error.message : "";
  find("problem").hidden = !error;
}

async function predict(picture) {
  const turn = ++state.turn;
  Object.assign(state, { picture, before: null, attack: null, rival: null });
  complain(null);
  try {
    const models = state.about.compared ? ["served", "compared"] : ["served"];
    const found = await Promise.all(
      models.map((model) => ask("/v1/predict", { images: [picture], top: 3, details: true, model })));
    if (turn !== state.turn) return;
    state.before = found[0].predictions[0];
    if (found[1]) state.rival = { before: found[1].predictions[0], attack: null };
    if (state.before.error) complain(new Error(state.before.error));
  } catch (error) {
    if (turn === state.turn) complain(error);
  }
  if (turn === state.turn) show();
}

async function attack() {
  const turn = ++state.turn;
  const body = settings();
  complain(null);
  find("go").disabled = true;
  find("results").setAttribute("aria-busy", "true");
  find("outcome").textContent = "Attacking …";
  try {
    const models = state.about.compared ? ["served", "compared"] : ["served"];
    const found = await Promise.all(models.map((model) => ask("/v1/attack", forModel(body, model))));
    if (turn !== state.turn) return;
    state.attack = found[0];
    state.before = found[0].before;
    if (found[1]) state.rival = { before: found[1].before, attack: found[1] };
  } catch (error) {
    if (turn === state.turn) complain(error);
  } finally {
    find("results").removeAttribute("aria-busy");
  }
  if (turn === state.turn) show();
}

function settings() {
  const kind = offer();
  const body = { image: state.picture, attack: kind.name, norm: find("norm").value, seed: Number(find("seed").value) };
  if (kind.has_eps) body.eps = Number(find("eps-number").value);
  if (kind.has_steps) body.steps = Number(find("steps").value);
  if (kind.on.length && !find("on").disabled) body.on = find("on").value;
  return body;
}

// A network without members is attacked where it has something to look at.
function forModel(body, model) {
  const facts = model === "served" ? state.about.model : state.about.compared;
  return { ...body, model, ...(body.on && !facts.code ? { on: "scores" } : {}) };
}

const offer = () => state.about.attacks.find((kind) => kind.name === find("attack").value);

// Showing what came back

function show() {
  const { before, attack: done } = state;
  const hasAnswer = Boolean(before && before.guesses.length);
  find("go").disabled = !hasAnswer;
  find("undo").disabled = !done;
  find("outcome").textContent = hasAnswer ? sentence() : "Choose a picture.";
  showImage("before", before && before.picture, "the picture as the model takes it");
  showImage("after", done && done.after.picture, "the attacked picture");
  showImage("change", done && done.perturbation, "what the attack changed: mid grey is nothing");
  find("class-before").textContent = hasAnswer ? `${best(before).name}, ${percent(best(before).probability)}` : "";
  const after = done && done.after.guesses.length ? best(done.after) : null;
  find("class-after").textContent = after ? `${after.name}, ${percent(after.probability)}` : "";
  find("class-after").classList.toggle("changed", Boolean(done && done.success));
  find("size-change").textContent = done ? `${normName(done.norm)} ${short(done[done.norm])}` : "";
  showRounding();
  showCode();
  showRival();
}

const attackName = (name) =>
  ({ deepfool: "DeepFool", square: "Square Attack", noise: "Random noise" })[name] || name.toUpperCase();
const normName = (norm) => ({ linf: "Linf", l2: "L2", l1: "L1" })[norm] || norm;

function sentence() {
  const { before, attack: done } = state;
  const first = `The model says ${best(before).name}, with ${percent(best(before).probability)}.`;
  if (!done) return first;
  const bits = done.before.details.bits;
  const flips = bits ? ` ${done.flipped.length} of ${bits.length} members changed their answer.` : "";
  const cost = done.backwards ? counted(done.backwards, "gradient", "gradients") : counted(done.forwards, "query", "queries");
  const name = attackName(done.attack);
  if (!done.success) return `${name} fails after ${cost}: the model still says ${best(before).name}.${flips}`;
  const now = done.after.guesses.length ? best(done.after).name : "nothing";
  return `${name} turns ${best(before).name} into ${now} with ${cost}.${flips}`;
}

function showImage(place, content, description) {
  const image = find(`image-${place}`);
  image.hidden = !content;
  if (content) image.src = `data:image/png;base64,${content}`;
  else image.removeAttribute("src");
  image.alt = content ? description : "";
}

function showRounding() {
  const done = state.attack;
  const isLost = done && done.success && done.before.guesses.length && done.rounded_label === best(done.before).label;
  find("rounding").hidden = !isLost;
  if (isLost) find("rounding").textContent = `Rounded to bytes, as a file holds it, the attacked picture is ${done.rounded_name} again.`;
}

// A row of symbols. `names` says how each is drawn: "changed", "faint" or as it is.
function bitRow(symbols, names, label) {
  const picture = drawn("svg", { viewBox: `0 0 ${symbols.length * SIDE} ${SIDE}`, role: "img", "aria-label": label });
  picture.setAttribute("preserveAspectRatio", "xMinYMid meet");
  symbols.forEach((symbol, place) => {
    const name = names[place];
    if (arity() > 2) {
      const text = drawn("text", { x: place * SIDE + SIDE / 2, y: 7.5, class: name });
      text.textContent = symbol;
      picture.append(text);
      return;
    }
    picture.append(drawn("rect", { x: place * SIDE + 1.5, y: 1.5, width: 7, height: 7, rx: 1.5, "stroke-width": 1, class: `${symbol ? "one" : "zero"} ${name}` }));
  });
  return picture;
}

function meter(share) {
  const cell = element("td", undefined, "meter");
  const bar = element("span");
  const inner = element("i");
  inner.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  bar.append(inner);
  cell.append(bar);
  return cell;
}

function codeHead() {
  const head = element("thead");
  const row = element("tr");
  row.append(element("th", ""), element("th", "members"));
  const distance = element("th", "distance", "number");
  const probability = element("th", "probability", "number");
  distance.colSpan = 2;
  probability.colSpan = 2;
  row.append(distance, probability);
  for (const cell of row.children) cell.scope = "col";
  head.append(row);
  return head;
}

function saidRow(title, bits, off, isLast) {
  const row = element("tr", undefined, isLast ? "said last" : "said");
  const name = element("th", title);
  name.scope = "row";
  const cell = element("td", undefined, "bits");
  const count = off.filter(Boolean).length;
  const names = off.map((isOff) => (isOff ? "changed" : ""));
  cell.append(bitRow(bits, names, `bits ${bits.join("")}${count ? `, ${count} changed` : ""}`));
  const rest = element("td", count ? `${count} changed` : "", "number changed");
  rest.colSpan = 4;
  row.append(name, cell, rest);
  return row;
}

function classRow(label, details, isDecoded) {
  const model = state.about.model;
  const row = element("tr", undefined, isDecoded ? "decoded" : "");
  row.dataset.label = label;
  const name = element("th", label < model.num_classes ? model.classes[label] : `codeword ${label}`);
  name.scope = "row";
  name.title = model.classes[label];
  row.append(name);
  const cell = element("td", undefined, "bits");
  if (model.code) {
    const word = model.code[label];
    const names = word.map((symbol, place) => (symbol === details.bits[place] ? "" : "faint"));
    cell.append(bitRow(word, names, `codeword ${word.join("")}, ${names.filter(Boolean).length} members differ`));
  }
  row.append(cell);
  const distance = details.distances ? details.distances[label] : null;
  row.append(distance === null ? element("td") : meter(distance / model.code[0].length));
  row.append(element("td", distance === null ? "" : distance.toFixed(1), "number distance"));
  const probability = details.probabilities[label];
  row.append(meter(probability), element("td", percent(probability), "number probability"));
  return row;
}

const arity = () => Math.max(...state.about.model.code.flat()) + 1;

function showCode() {
  const { before, attack: done, about } = state;
  const table = find("code");
  table.replaceChildren();
  const details = done ? done.after.details : before && before.details;
  if (!details) {
    find("code-text").textContent = about.model.code
      ? `${about.model.num_classes} classes, ${about.model.code[0].length} members. Choose a picture to see what each of them says.`
      : "";
    return;
  }
  const body = element("tbody");
  if (details.bits) {
    const off = details.bits.map((bit, place) => Boolean(done && done.before.details.bits[place] !== bit));
    const old = done ? done.before.details.bits : details.bits;
    body.append(saidRow("picture", old, old.map(() => false), !done));
    if (done) body.append(saidRow("attacked", details.bits, off, true));
  }
  const order = [...details.probabilities.keys()];
  const rank = (a, b) => details.probabilities[b] - details.probabilities[a];
  const kept = order.length > MOST_ROWS ? order.sort(rank).slice(0, MOST_ROWS) : order;
  const answer = done ? done.after : before;
  const decoded = answer.guesses.length ? best(answer).label : -1;
  for (const label of kept) body.append(classRow(label, details, label === decoded));
  table.append(codeHead(), body);
  const rest = kept.length < order.length ? ` The ${kept.length} most probable of ${order.length} are shown.` : "";
  find("code-text").textContent = about.model.code
    ? `Each member answers one question of the code. The class with the highest probability wins. A distance is how many members are expected to disagree with a codeword.${rest}`
    : `This model has no code: only its probabilities can be shown.${rest}`;
}

function showLegend() {
  const legend = find("legend");
  legend.hidden = !state.about.model.code || arity() > 2;
  const entries = [["one", "1"], ["zero", "0"], ["one faint", "not what the member says"], ["one changed", "changed by the attack"]];
  for (const [name, text] of entries) {
    const entry = element("span");
    const sample = drawn("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
    sample.append(drawn("rect", { x: 1.5, y: 1.5, width: 7, height: 7, rx: 1.5, class: name }));
    entry.append(sample, text);
    legend.append(entry);
  }
}

function showRival() {
  const { about, rival, before, attack: done } = state;
  find("compare-card").hidden = !about.compared;
  if (!about.compared) return;
  find("compare-text").textContent = "Both see the same picture. Each is attacked on its own, with the same settings.";
  const table = find("compare");
  table.replaceChildren();
  const head = element("tr");
  for (const title of ["network", "picture", "attacked", "moved"]) head.append(element("th", title));
  const body = element("tbody");
  for (const [facts, own, result] of [[about.model, before, done], [about.compared, rival && rival.before, rival && rival.attack]]) {
    const row = element("tr");
    const name = element("th", facts.kind);
    name.append(element("small", facts.name));
    name.scope = "row";
    row.append(name);
    row.append(element("td", own && own.guesses.length ? `${best(own).name}, ${percent(best(own).probability)}` : ""));
    const now = result && result.after.guesses.length ? `${best(result.after).name}, ${percent(best(result.after).probability)}` : "";
    row.append(element("td", now, result && result.success ? "changed" : ""));
    row.append(element("td", result ? `${normName(result.norm)} ${short(result[result.norm])}` : ""));
    body.append(row);
  }
  const top = element("thead");
  top.append(head);
  table.append(top, body);
}

function showAudit() {
  const { audit } = state.about.model;
  if (!audit) {
    find("audit-headline").textContent = "Not audited";
    find("audit-reason").textContent =
      "The run folder holds no audit. ecnn audit RUN --eps 8/255 --out RUN writes one there: what an attack leaves, and whether to believe it.";
    return;
  }
  const link = find("verdict-link");
  link.hidden = false;
  link.textContent = `Audit: ${audit.headline}`;
  find("audit-headline").textContent = audit.headline;
  find("audit-reason").textContent = audit.reason;
  const rows = [["without an attack", audit.clean_accuracy], ["plain attack", audit.plain_accuracy], ["audited", audit.accuracy]];
  if (audit.claimed !== null) rows.unshift(["claimed", audit.claimed]);
  if (audit.certified !== null) rows.push(["certified", audit.certified]);
  for (const [title, share] of rows) {
    const bar = element("dd", undefined, title === "audited" ? "bar audited" : "bar");
    const inner = element("i");
    inner.style.width = `${100 * share}%`;
    bar.append(inner);
    if (title === "audited") {
      const [low, high] = audit.interval;
      const whisker = element("b");
      whisker.style.left = `${100 * low}%`;
      whisker.style.width = `${100 * (high - low)}%`;
      bar.append(whisker);
    }
    find("audit-bars").append(element("dt", title), bar, element("dd", percent(share), "number"));
  }
  for (const claim of audit.alarms) find("audit-alarms").append(element("li", claim));
  const [low, high] = audit.interval;
  find("audit-facts").textContent =
    `${audit.images} images, ${normName(audit.norm)} ${short(audit.eps)}, budget ${audit.budget}. ` +
    `The line on the audited bar is its 95 % interval, ${percent(low)} to ${percent(high)}.` +
    (audit.certified === null ? "" : ` No attack can leave less than what is certified, by ${audit.certified_by}.`);
}

// Choosing a picture

function chooseTab(name, isFocused) {
  for (const tab of document.querySelectorAll('[role="tab"]')) {
    const isChosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    find(tab.getAttribute("aria-controls")).hidden = !isChosen;
    if (isChosen && isFocused) tab.focus();
  }
}

function setUpTabs() {
  const tabs = [...document.querySelectorAll('[role="tab"]')].filter((tab) => !tab.hidden);
  tabs.forEach((tab, place) => {
    tab.addEventListener("click", () => chooseTab(tab.id.slice(4), false));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      chooseTab(tabs[(place + step + tabs.length) % tabs.length].id.slice(4), true);
    });
  });
}

function setUpExamples(examples) {
  find("no-examples").hidden = examples.length > 0;
  examples.forEach((example, place) => {
    const button = element("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    const image = element("img");
    image.src = `data:image/png;base64,${example.image}`;
    image.alt = `${example.name}, test image`;
    button.title = example.name;
    button.append(image);
    button.addEventListener("click", () => {
      for (const other of find("examples").children) other.setAttribute("aria-pressed", String(other === button));
      predict(example.image);
    });
    find("examples").append(button);
    if (place === 0) button.click();
  });
}

function setUpDrawing() {
  const canvas = find("canvas");
  const brush = find("brush");
  const pen = canvas.getContext("2d");
  const { height, width } = state.about.model;
  canvas.height = Math.round((canvas.width * height) / width);
  const at = { x: canvas.width / 2, y: canvas.height / 2 };
  const share = Math.max(0.11, 1.7 / width); // of the board, how wide a stroke is: nearly two pixels at least
  brush.style.width = `${100 * share}%`;
  brush.style.margin = `${-50 * share}% 0 0 ${-50 * share}%`;
  let last = null;

  const clear = () => {
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, canvas.width, canvas.height);
  };
  const paint = (from, to) => {
    pen.strokeStyle = "#fff";
    pen.lineWidth = canvas.width * share;
    pen.lineCap = pen.lineJoin = "round";
    pen.beginPath();
    pen.moveTo(from.x, from.y);
    pen.lineTo(to.x + 0.01, to.y);
    pen.stroke();
  };
  const send = () => predict(canvas.toDataURL("image/png").split(",")[1]);
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: ((event.clientX - box.left) * canvas.width) / box.width, y: ((event.clientY - box.top) * canvas.height) / box.height };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    brush.hidden = true;
    last = place(event);
    paint(last, last);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!last) return;
    const now = place(event);
    paint(last, now);
    last = now;
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => {
      if (last) send();
      last = null;
    });
  }
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], " ": [0, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const before = { ...at };
    at.x = Math.min(canvas.width, Math.max(0, at.x + (step[0] * canvas.width) / 16));
    at.y = Math.min(canvas.height, Math.max(0, at.y + (step[1] * canvas.height) / 16));
    brush.hidden = false;
    brush.style.left = `${(100 * at.x) / canvas.width}%`;
    brush.style.top = `${(100 * at.y) / canvas.height}%`;
    if (event.key !== " " && !event.shiftKey) return;
    paint(before, at);
    send();
  });
  canvas.addEventListener("blur", () => { brush.hidden = true; });
  find("clear").addEventListener("click", () => {
    clear();
    send();
  });
  clear();
}

function setUpUpload() {
  const input = find("file");
  const area = input.parentElement;
  const read = (file) => {
    if (!file) return;
    const most = Math.floor(state.about.limits.request_bytes * 0.7); // base64 takes a third more
    if (file.size > most) {
      complain(new Error(`${file.name} has ${file.size} bytes, and at most ${most} can be sent.`));
      return;
    }
    const reader = new FileReader();
    reader.addEventListener("load", () => predict(reader.result.split(",")[1] || ""));
    reader.addEventListener("error", () => complain(new Error(`${file.name} cannot be read.`)));
    reader.readAsDataURL(file);
  };
  input.addEventListener("change", () => read(input.files[0]));
  area.addEventListener("dragover", (event) => { event.preventDefault(); area.classList.add("over"); });
  area.addEventListener("dragleave", () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    area.classList.remove("over");
    read(event.dataTransfer.files[0]);
  });
}

// Choosing an attack

function fill(select, values, chosen) {
  select.replaceChildren(...values.map(([value, text]) => {
    const option = element("option", text);
    option.value = value;
    option.selected = value === chosen;
    return option;
  }));
}

function showOffer() {
  const kind = offer();
  const hasCode = Boolean(state.about.model.code);
  const views = hasCode ? kind.on : kind.on.filter((view) => view === "scores");
  const before = find("on").value;
  const usual = views.includes("members") ? "members" : "scores";
  fill(find("on"), views.map((view) => [view, view]), views.includes(before) ? before : usual);
  for (const [name, isThere] of [["on", views.length > 1], ["eps", kind.has_eps], ["steps", kind.has_steps]]) {
    for (const part of document.querySelectorAll(`.for-${name}`)) part.hidden = !isThere;
    find(name).disabled = !isThere;
  }
  find("eps-number").disabled = !kind.has_eps;
}

function setRadius(value) {
  find("eps-number").value = value;
  showRadius();
}

// What is being typed is left alone: it may be empty, or no number yet.
function showRadius() {
  const value = find("eps-number").valueAsNumber;
  const isRadius = value >= 0;
  if (isRadius) find("eps").value = value;
  const inBytes = isRadius ? `${short(value * 255)}/255 per pixel` : "";
  find("eps-text").textContent = find("norm").value === "linf" ? inBytes : "pixels lie in [0, 1]";
}

function setNorm() {
  const { audit, in_channels: channels } = state.about.model;
  const norm = find("norm").value;
  find("eps").max = SPANS[norm] || 1;
  const usual = { linf: channels === 1 ? 0.12 : 8 / 255, l2: channels === 1 ? 1 : 0.5, l1: channels === 1 ? 5 : 12 }[norm];
  setRadius(Number((audit && audit.norm === norm ? audit.eps : usual).toPrecision(4)));
}

function setUpAttack() {
  const names = { linf: "Linf, all pixels", l2: "L2, Euclidean", l1: "L1, few pixels" };
  fill(find("attack"), state.about.attacks.map((kind) => [kind.name, attackName(kind.name)]), "pgd");
  fill(find("norm"), state.about.norms.map((norm) => [norm, names[norm] || norm]), "linf");
  find("steps").max = state.about.limits.attack_steps;
  find("attack").addEventListener("change", showOffer);
  find("norm").addEventListener("change", setNorm);
  find("eps").addEventListener("input", () => setRadius(Number(short(find("eps").valueAsNumber))));
  find("eps-number").addEventListener("input", showRadius);
  find("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!find("go").disabled) attack();
  });
  find("undo").addEventListener("click", () => predict(state.picture));
  showOffer();
  setNorm();
}

async function start() {
  try {
    state.about = await ask("/v1/model");
    const { model } = state.about;
    const size = `${model.width} x ${model.height} ${model.in_channels === 1 ? "grey" : "colour"} pixels`;
    const spare = model.classes.length > model.num_classes ? `, ${model.classes.length} codewords` : "";
    const members = model.code ? `, ${model.code[0].length} members` : "";
    document.title = `ecnn: ${model.name}`;
    find("title").textContent = model.name;
    find("facts").textContent = `${model.kind} on ${model.data}: ${model.num_classes} classes${spare}${members}, ${size}`;
    find("tab-draw").hidden = model.in_channels !== 1;
    setUpTabs();
    setUpAttack();
    setUpDrawing();
    setUpUpload();
    showLegend();
    showAudit();
    show();
    const { examples } = await ask("/v1/examples");
    setUpExamples(examples);
    if (!examples.length) chooseTab(model.in_channels === 1 ? "draw" : "upload", false);
  } catch (error) {
    complain(error);
  }
}

start();
