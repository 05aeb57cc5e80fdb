// A group's completions side by side: rewards, and the text with every token in the colour of what the loss did with it.
const FIRST_TOKENS = 1500; // shown of a completion before "show more"
const FIRST_CHARACTERS = 6000;
const CARDS_AT_ONCE = 12;
const STRONGEST = 62; // per cent of colour in the background
const partOf = new WeakMap(); // of a span: its card's data, the places of its tokens, its characters
let drawn = 0; // of drawings; an older one that waited for its chunk must not overtake a newer one

async function showGroup(focusOn = null) {
  const mine = ++drawn;
  const step = stepNow();
  const group = groupsOf(step)[state.group];
  const [text, unpacked] = await Promise.all([textsOf(step), numbersOf(step)]);
  if (mine !== drawn) return;
  hideTip();
  at("prompt-title").textContent = `Prompt ${group.number} at step ${step.step}, ${count(group.rows.length)} completions`;
  const asked = text.prompt[group.rows[0]];
  fillPrompt(text.prompts[asked]);
  const pictures = text.pictures[asked].map((src, number) => element("img", { src, alt: `picture ${number + 1} of the prompt` }));
  at("pictures").replaceChildren(...pictures);
  const cards = group.rows.map((row) => cardData(step, row, text, unpacked));
  const largest = cards.reduce((most, card) => Math.max(most, card.largest), 0);
  fillLegend(cards, largest);
  const ordered = inOrder(group.rows.map((row) => ({ step, row }))).map(({ row }) => cards[group.rows.indexOf(row)]);
  if (focusOn !== null) {
    const wanted = ordered.findIndex((card) => card.row === focusOn);
    if (wanted >= CARDS_AT_ONCE) ordered.unshift(...ordered.splice(wanted, 1));
  }
  at("cards").replaceChildren();
  appendCards(ordered, largest);
}

function appendCards(cards, largest) {
  at("cards").append(...cards.slice(0, CARDS_AT_ONCE).map((card) => cardElement(card, largest)));
  const rest = cards.slice(CARDS_AT_ONCE);
  const more = at("more-cards");
  more.hidden = rest.length === 0;
  more.textContent = `Show more completions (${rest.length})`;
  more.onclick = () => appendCards(rest, largest);
}

function cardData(step, row, text, unpacked) {
  const card = { step, row, completion: text.completions[row], tokens: null, largest: 0 };
  if (unpacked === null) return card;
  Object.assign(card, unpacked[row]);
  card.tokens = card.token;
  card.vocabulary = text.vocabulary;
  card.stages = text.stages;
  card.trained = step.trained[row];
  card.credit = card.token.length ? Float64Array.from(card.token, (_, place) => creditOf(card, place)) : new Float64Array();
  card.failed = new Set(text.failed[row]);
  card.parts = text.parts[row];
  card.turns = new Map(); // the credit of each, where there is more than one turn, or an error to be seen
  if (card.turn.some((turn) => turn !== 0) || card.failed.size) card.turn.forEach((turn, place) => card.turns.set(turn, (card.turns.get(turn) ?? 0) + card.credit[place]));
  card.credit.forEach((value) => (card.largest = Math.max(card.largest, Math.abs(value))));
  return card;
}

// Advantage times weight; before training the last advantage; nothing for a token that does not count.
function creditOf(card, place) {
  if (!card.live[place]) return 0;
  const last = card.stage.length ? card.stage[card.stage.length - 1][place] : 0;
  const value = card.trained ? card.advantage[place] * card.weight[place] : last;
  return Number.isFinite(value) ? value : 0;
}

function cardElement(card, largest) {
  const { step, row } = card;
  const words = verdicts(step, row);
  const title = element("h3", {}, `#${step.member[row]}`, ...words.map(([text, kind]) => element("span", { class: `badge ${kind}`, text })), element("span", { class: "hint", text: sizeOf(step, row) }));
  const label = `completion ${step.member[row]}: ${words.map(([text]) => text).join(", ")}, ${sizeOf(step, row)}`;
  const made = element("article", { class: "card", tabindex: "0", "aria-label": label, "data-member": step.member[row] }, title, rewardTable(step, row));
  if (card.tokens !== null && !card.trained) made.append(element("p", { class: "hint", text: "Not trained on before this was saved: colours show the advantage alone." }));
  if (card.size?.[0] === -1) made.append(element("p", { class: "hint", text: "Its characters could not be matched to its tokens, so these are the tokens\u2019 names." }));
  const shownText = element("div", { class: "tokens text" });
  const more = element("button", { type: "button", class: "more" });
  made.append(shownText, more);
  const grow = card.tokens === null ? plainGrower(card, shownText) : tokenGrower(card, shownText, largest);
  const next = () => {
    const rest = grow();
    more.hidden = rest === "";
    more.textContent = `Show more (${rest})`;
  };
  more.addEventListener("click", next);
  next();
  return made;
}

function rewardTable(step, row) {
  const body = element("tbody");
  for (const [name, values] of Object.entries(step.rewards)) {
    const outcome = own(step.outcomes[row], name);
    const entry = line(name, shown(values[row]));
    if (outcome) entry.firstChild.append(element("span", { class: "outcome", text: ` ${visible(outcome)}` }));
    body.append(entry);
  }
  if (step.reward[row] !== null) body.append(line("weighted sum", shown(step.reward[row]), "total"));
  body.append(line(step.trained[row] ? "advantage \u00d7 weight, summed" : "advantage", shown(step.credit[row]), "total"));
  return element("table", { class: "rewards", "aria-label": "rewards" }, body);
}

// Each call shows as much again as is there already, and says what is left. The text is cut into stretches, since a browser
// lays out one paragraph of 80,000 elements for a minute, and leaves alone the stretches that are out of view.
function plainGrower(card, into) {
  let place = 0;
  return () => {
    for (let stretches = Math.max(1, into.childElementCount); stretches > 0 && place < card.completion.length; stretches--) {
      const part = beginning(card.completion.slice(place, place + FIRST_CHARACTERS + 1), FIRST_CHARACTERS);
      place += part.length;
      into.append(element("div", { class: "stretch", dir: "auto", text: visible(part) }));
    }
    return place < card.completion.length ? `${count(card.completion.length - place)} characters are left` : "";
  };
}

function tokenGrower(card, into, largest) {
  const at = { place: 0, end: 0, cursor: 0 };
  return () => {
    for (let stretches = Math.max(1, into.childElementCount); stretches > 0 && at.place < card.token.length; stretches--) {
      const parts = nextParts(card, at).flatMap((part) => (typeof part === "string" ? [part] : [...turnHead(part), tokenElement(part, largest)]));
      into.append(element("div", { class: "stretch", dir: "auto" }, ...parts));
    }
    return at.place < card.token.length ? `${count(card.token.length - at.place)} tokens are left` : "";
  };
}

// The parts of the next stretch: a string where no token wrote it, else the tokens that share an element.
function nextParts(card, at) {
  const named = card.size[0] === -1;
  const stop = Math.min(at.place + FIRST_TOKENS, card.token.length);
  const parts = [];
  let characters = 0;
  let last = null;
  for (; at.place < stop && characters < FIRST_CHARACTERS; at.place++) {
    let text = card.vocabulary[card.token[at.place]];
    if (!named) {
      const start = at.end + card.gap[at.place];
      at.end = start + card.size[at.place];
      // Of a character whose bytes are cut over several tokens each has the whole: they share one element.
      if (last !== null && start < at.end && at.end <= at.cursor) {
        last.places.push(at.place);
        continue;
      }
      if (start > at.cursor) parts.push(visible(card.completion.slice(at.cursor, start)));
      text = card.completion.slice(Math.max(start, at.cursor), Math.max(at.end, at.cursor));
      at.cursor = Math.max(at.cursor, at.end);
    }
    characters += text.length;
    last = { card, places: [at.place], text };
    parts.push(last);
  }
  if (!named && at.place === card.token.length && at.cursor < card.completion.length) parts.push(visible(card.completion.slice(at.cursor)));
  return parts;
}

// What stands above the first token of a turn, and of what a tool or an environment wrote.
function turnHead({ card, places: [place] }) {
  const turn = card.turn[place];
  if (!card.turns.size || (place > 0 && card.turn[place - 1] === turn)) return [];
  if (turn < 0) return [element("span", { class: "turn result", text: "not the model\u2019s" })];
  const failed = card.failed.has(turn);
  const text = `turn ${count(turn + 1)}, credit ${shown(card.turns.get(turn))}${failed ? ", a tool call failed" : ""}`;
  return [element("span", { class: `turn${failed ? " failed" : ""}`, text })];
}

function tokenElement(part, largest) {
  const { card, places, text } = part;
  const value = places.reduce((sum, place) => sum + card.credit[place], 0);
  const live = places.some((place) => card.live[place]);
  const kind = `token${value > 0 ? " up" : value < 0 ? " down" : ""}${live ? "" : " off"}${text === "" ? " bare" : ""}${card.turn[places[0]] < 0 ? " result" : ""}`;
  const span = element("span", { class: kind, tabindex: "-1" });
  const head = beginning(text, FIRST_CHARACTERS);
  const cut = text.length - head.length;
  const written = visible(head).replaceAll("\n", "\u21b5\n");
  span.textContent = text === "" ? "\u00b7" : written + (cut ? `\u2026 (${count(cut)} more characters in this token)` : "");
  const share = Math.min(1, Math.sqrt(Math.abs(value) / largest));
  if (value) span.style.setProperty("--strength", String(Math.round(8 + (STRONGEST - 8) * share)));
  partOf.set(span, part);
  return span;
}

function fillPrompt(text) {
  const head = beginning(text, FIRST_CHARACTERS);
  at("prompt").textContent = visible(head);
  if (head.length < text.length) {
    const more = element("button", { type: "button", class: "more", text: `Show the rest (${count(text.length - head.length)} characters)` });
    more.addEventListener("click", () => (at("prompt").textContent = visible(text)));
    at("prompt").append("\u2026 ", more);
  }
}

function fillLegend(cards, largest) {
  const legend = at("legend");
  legend.hidden = cards.every((card) => card.tokens === null);
  const sample = (kind, text) => {
    const span = element("span", { class: `sample token ${kind}`, text });
    span.style.setProperty("--strength", String(STRONGEST));
    return span;
  };
  const what = cards.some((card) => card.trained) ? "advantage \u00d7 weight" : "advantage";
  legend.replaceChildren(
    `Colour is ${what} of the token:`,
    sample("up", `up to ${shown(largest)}, solid line`),
    sample("down", `down to ${shown(-largest)}, dashed line`),
    sample("off", "does not count in the loss"),
    sample("bare", "\u00b7 wrote no characters"),
  );
}
