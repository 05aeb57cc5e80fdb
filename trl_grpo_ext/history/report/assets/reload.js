// While a training is watched the page is written again and again; it reloads as often, unless somebody is using it.
const KEPT = "trl-grpo-ext-report-place";
const QUIET_SECONDS = 10;

function watchTraining() {
  const seconds = Number(document.documentElement.dataset.reload);
  if (!(seconds > 0)) return;
  let used = -Infinity;
  for (const kind of ["pointermove", "pointerdown", "keydown", "wheel", "touchmove"]) {
    addEventListener(kind, () => { used = performance.now(); }, { passive: true, capture: true });
  }
  setInterval(() => {
    if (document.visibilityState !== "visible" || performance.now() - used < 1000 * QUIET_SECONDS) return;
    keepPlace();
    location.reload();
  }, 1000 * seconds);
}

// What is looked at, by number and name, since there may be more of both after the reload.
function keepPlace() {
  if (!at("cards") || INDEX.runs.length === 0) return;
  const { right, from, filter, sort, text } = state;
  const [step, group] = runNow().opens;
  const asOpened = state.step === step && state.group === group;
  const last = state.step === runNow().steps.length - 1;
  const place = { run: runNow().name, step: last ? null : stepNow().step, group: state.group, asOpened, right, from, filter, sort, text };
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(place));
  } catch {
    // A browser may keep nothing for files; then the page begins at its start.
  }
}

// Go back there. Whoever had not moved sees what the page opens on now, and whoever was at the newest step the newest.
async function returnToPlace() {
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(KEPT));
    sessionStorage.removeItem(KEPT);
  } catch {
    // As above.
  }
  const run = INDEX.runs.findIndex(({ name, steps }) => name === kept?.run && steps.length);
  if (run < 0 || !document.documentElement.dataset.reload) return;
  for (const name of ["filter", "sort"]) {
    at(name).value = kept[name];
    if (at(name).value === kept[name]) state[name] = kept[name];
    else at(name).value = state[name];
  }
  state.right = kept.right;
  for (const [name, value] of Object.entries(kept.from ?? {})) if (Number.isFinite(value)) state.from[name] = value;
  state.text = at("search").value = String(kept.text ?? "");
  at("run").value = String(run);
  await chooseRun(run);
  if (kept.asOpened) return;
  const step = kept.step === null ? runNow().steps.length - 1 : runNow().steps.findIndex(({ step: number }) => number === kept.step);
  if (step >= 0 && step !== state.step) await moveStep(step - state.step);
  const group = Math.min(Number(kept.group) || 0, groupsOf(stepNow()).length - 1);
  if (group !== state.group) await moveGroup(group - state.group);
}
