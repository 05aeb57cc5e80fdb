// What the loss did with the token under the pointer or the focus.
const tip = at("tip");
const MOST_SHOWN = 300; // characters
const MOST_TOKENS = 4; // side by side
let described = null;

function showTip(span) {
  const part = partOf.get(span);
  if (!part) return hideTip();
  const { card, places, text } = part;
  const shownPlaces = places.slice(0, MOST_TOKENS);
  const body = element("tbody");
  const add = (name, value, kind) => body.append(line(name, shownPlaces.map((place) => shown(value(place))), kind));
  card.stages.forEach((name, stage) => {
    if (shownPlaces.some((place) => !Number.isNaN(card.stage[stage][place]))) add(name, (place) => card.stage[stage][place], "stage");
  });
  add("advantage in the loss", (place) => card.advantage[place]);
  add("weight in the loss", (place) => card.weight[place]);
  add("advantage \u00d7 weight", (place) => card.advantage[place] * card.weight[place], "total");
  add("log-probability", (place) => card.logp[place]);
  add("probability", (place) => Math.exp(card.logp[place]));
  add("entropy (nats)", (place) => card.entropy[place]);
  const written = visible(beginning(text, MOST_SHOWN)).replaceAll("\n", "\u21b5");
  const heading = text === "" ? "wrote no characters" : `\u201c${written}\u201d`;
  const [first, last] = [places[0] + 1, places[places.length - 1] + 1];
  const which = first === last ? `token ${first}` : `tokens ${first} to ${last}, which share a character,`;
  const parts = [...new Set(shownPlaces.map((place) => card.part[place]))].filter((part) => part >= 0).map((part) => card.parts[part]);
  const counts = places.every((place) => card.live[place]) ? "" : "; does not count in the loss";
  const names = shownPlaces.flatMap((place, n) => [n ? ", " : "", element("bdi", { text: visible(beginning(card.vocabulary[card.token[place]], MOST_SHOWN)) })]);
  tip.replaceChildren(
    element("p", { class: "written", dir: "auto", text: heading }),
    element("p", { class: "hint" }, `${which} of ${count(card.token.length)}, in the vocabulary `, ...names, counts),
    ...parts.map(([name, score]) => element("p", { class: "hint part" }, "part ", element("bdi", { text: visible(name) }), `, score ${shown(score)}`)),
    element("table", { "aria-label": "advantage after each stage, and what the loss used" }, body),
  );
  tip.hidden = false;
  described?.removeAttribute("aria-describedby");
  described = span;
  span.setAttribute("aria-describedby", "tip");
  placeTip();
}

// Below the token, or above it where there is no room; never outside the window.
function placeTip() {
  if (described === null) return;
  const box = described.getClientRects()[0] ?? described.getBoundingClientRect();
  tip.style.visibility = box.bottom < 0 || box.top > window.innerHeight ? "hidden" : "visible";
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8));
  const below = box.bottom + 6;
  const top = below + height < window.innerHeight ? below : Math.max(8, box.top - height - 6);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

function hideTip() {
  tip.hidden = true;
  described?.removeAttribute("aria-describedby");
  described = null;
}

function watchTokens(cards) {
  const over = (event) => (event.target.closest?.(".token") ? showTip(event.target.closest(".token")) : hideTip());
  for (const kind of ["mouseover", "focusin", "click"]) cards.addEventListener(kind, over);
  cards.addEventListener("mouseleave", hideTip);
  cards.addEventListener("focusout", hideTip);
  document.addEventListener("scroll", placeTip, { capture: true, passive: true });
}
