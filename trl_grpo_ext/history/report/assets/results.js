// The list of completions that a filter or a search found, all over the run; it is drawn a page at a time.
const RESULTS_AT_ONCE = 25;
const EXCERPT = 160;
let searched = 0;
let results = [];

async function showResults() {
  const mine = ++searched;
  const whole = state.filter === "all" && state.text === "";
  const total = everyRow(runNow()).length;
  const said = `${count(total)} completions of this run are on this page, at ${count(runNow().steps.length)} steps.`;
  if (!whole && state.text) at("status").textContent = "Searching\u2026";
  const found = whole ? [] : await matches();
  if (mine !== searched) return;
  results = found;
  at("status").textContent = whole ? said : `${count(found.length)} of ${count(total)} completions.`;
  at("results").hidden = found.length === 0;
  at("results").replaceChildren();
  moreResults();
}

function moreResults() {
  const list = at("results");
  const next = results.slice(list.childElementCount, list.childElementCount + RESULTS_AT_ONCE);
  list.append(...next.map(resultElement));
  at("more-results").hidden = list.childElementCount >= results.length;
}

function resultElement({ place, step, row }) {
  const words = verdicts(step, row).map(([text]) => text).join(", ");
  const reward = own(step.rewards, state.right)?.[row] ?? null;
  const title = `step ${step.step}, prompt ${step.group[row]}, #${step.member[row]}: ${words}; ${visible(state.right ?? "reward")} ${shown(reward)}; ${sizeOf(step, row)}`;
  const excerpt = element("span", { class: "excerpt" });
  const button = element("button", { type: "button", "data-key": `${step.step}/${step.group[row]}/${step.member[row]}` }, title, excerpt);
  textsOf(step).then((text) => (excerpt.textContent = excerptOf(text.completions[row])));
  button.addEventListener("click", async () => {
    at("results").querySelector('[aria-current="true"]')?.removeAttribute("aria-current");
    button.setAttribute("aria-current", "true");
    state.step = place;
    state.group = groupsOf(step).findIndex((group) => group.rows.includes(row));
    fillChoices();
    await showGroup(row);
    const card = at("cards").querySelector(`[data-member="${Number(step.member[row])}"]`);
    card?.scrollIntoView({ block: "nearest" });
    card?.focus({ preventScroll: true });
  });
  return element("li", {}, button);
}

// The beginning, or what stands around the searched text.
function excerptOf(text) {
  const found = state.text ? text.toLowerCase().indexOf(state.text.toLowerCase()) : 0;
  const from = Math.max(0, found - EXCERPT / 4);
  const cut = text.slice(from, from + EXCERPT).replace(/[\r\n\t]+/g, " ");
  return (from > 0 ? "\u2026" : "") + visible(cut);
}
