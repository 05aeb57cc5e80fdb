// What is looked at, and what of the run fits the filter, the search and the order.
const state = { run: 0, step: 0, group: 0, right: null, from: {}, filter: "all", text: "", sort: "sampled" };
const UNREAD = new Set(["no_answer", "unparseable_reference"]);

const runNow = () => INDEX.runs[state.run];
const stepNow = () => runNow().steps[state.step];

// The groups of a step: their numbers, and their rows in the order in which they were sampled.
function groupsOf(step) {
  if (!step.groups) {
    const found = new Map();
    step.group.forEach((number, row) => found.set(number, [...(found.get(number) ?? []), row]));
    step.groups = [...found].map(([number, rows]) => ({ number, rows }));
  }
  return step.groups;
}

// From which of its values on the chosen reward calls a completion right: 1, until somebody says otherwise.
const rightFrom = () => own(state.from, state.right) ?? 1;

// true, false, or null where the chosen reward gave nothing.
function isRight(step, row) {
  const value = own(step.rewards, state.right)?.[row] ?? null;
  return value === null ? null : value >= rightFrom();
}

function isUnparseable(step, row) {
  return (own(step.rewards, state.right)?.[row] ?? null) === null || UNREAD.has(own(step.outcomes[row], state.right));
}

// Tokens; characters where a step of the run has no tokens.
function lengths(run) {
  const name = run.steps.every((step) => step.numbers !== null) ? "length" : "characters";
  return (step, row) => step[name][row];
}

function everyRow(run) {
  return run.steps.flatMap((step, place) => step.group.map((_, row) => ({ place, step, row })));
}

const FILTERS = {
  all: () => () => true,
  "wrong-rewarded": () => ({ step, row }) => isRight(step, row) === false && step.credit[row] > 0,
  "right-punished": () => ({ step, row }) => isRight(step, row) === true && step.credit[row] < 0,
  truncated: () => ({ step, row }) => step.truncated[row] === true,
  unparseable: () => ({ step, row }) => isUnparseable(step, row),
  longest: (run, rows) => {
    const length = lengths(run);
    const sorted = [...rows].sort((one, other) => length(other.step, other.row) - length(one.step, one.row));
    const chosen = new Set(sorted.slice(0, Math.ceil(rows.length / 10)));
    return (each) => chosen.has(each);
  },
};

// Rows of the whole run that pass the filter and hold the searched text, in the chosen order.
async function matches() {
  const run = runNow();
  const rows = everyRow(run);
  let found = rows.filter(FILTERS[state.filter](run, rows));
  if (state.text) {
    const wanted = state.text.toLowerCase();
    const kept = [];
    for (const each of found) {
      if ((await textsOf(each.step)).completions[each.row].toLowerCase().includes(wanted)) kept.push(each);
    }
    found = kept;
  }
  return inOrder(found);
}

// In the chosen order; what has no value comes last, and what is equal stays as sampled.
function inOrder(rows) {
  const [what, way] = state.sort.split("-");
  if (what === "sampled") return rows;
  const length = lengths(runNow());
  const value = what === "length" ? (each) => length(each.step, each.row) : (each) => each.step[what][each.row];
  const missing = (each) => value(each) === null || value(each) === undefined;
  const sign = way === "up" ? 1 : -1;
  return [...rows].sort((one, other) => {
    if (missing(one) || missing(other)) return missing(one) - missing(other);
    return sign * (value(one) - value(other));
  });
}

// What is wrong or right with a completion, in words: [text, kind].
function verdicts(step, row) {
  const right = isRight(step, row);
  const credit = step.credit[row];
  const found = [];
  if (right !== null) found.push([right ? "\u2713 right" : "\u2717 wrong", right ? "good" : "bad"]);
  if (isUnparseable(step, row)) found.push(["unparseable", "bad"]);
  if (credit !== null && credit !== 0) found.push([credit > 0 ? "\u25b2 pushed up" : "\u25bc pushed down", credit > 0 ? "good" : "bad"]);
  if (credit === 0) found.push(["no signal", ""]);
  if (step.truncated[row]) found.push(["truncated", "bad"]);
  return found;
}

function sizeOf(step, row) {
  return step.length[row] === null ? `${count(step.characters[row])} characters` : `${count(step.length[row])} tokens`;
}
