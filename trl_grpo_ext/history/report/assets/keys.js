// Keys, for the whole page and inside cards and tokens.
function watchKeys() {
  const keys = at("keys");
  at("keys-button").addEventListener("click", () => keys.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
    if (event.key === "Escape") hideTip();
    if (event.target.closest?.("input, select, textarea")) return;
    const act = event.key === "?" ? () => keys.showModal() : completionKeys(event);
    if (act) {
      event.preventDefault();
      act();
    }
  });
}

// What a key does, or null.
function completionKeys(event) {
  if (!at("cards")) return null;
  const token = event.target.closest?.(".token");
  const card = event.target.closest?.(".card");
  if (event.key === "/") return () => at("search").focus();
  if (event.key === "n") return () => moveGroup(1);
  if (event.key === "p") return () => moveGroup(-1);
  if (event.key === "]") return () => moveStep(1);
  if (event.key === "[") return () => moveStep(-1);
  if (token) return tokenKeys(event.key, token, card);
  if (card && event.target === card) return cardKeys(event.key, card);
  return null;
}

function cardKeys(key, card) {
  const beside = { ArrowRight: card.nextElementSibling, ArrowLeft: card.previousElementSibling };
  if (key in beside) return () => beside[key]?.focus();
  if (key === "ArrowDown") return () => moveStep(1);
  if (key === "ArrowUp") return () => moveStep(-1);
  if (key === "Enter") return () => card.querySelector(".token")?.focus();
  return null;
}

function tokenKeys(key, token, card) {
  const walk = (way) => {
    let next = token[way];
    while (next && !next.classList.contains("token")) next = next[way];
    const stretch = token.parentElement[way];
    (next ?? stretch?.[way === "nextElementSibling" ? "firstElementChild" : "lastElementChild"])?.focus();
  };
  if (key === "ArrowRight") return () => walk("nextElementSibling");
  if (key === "ArrowLeft") return () => walk("previousElementSibling");
  if (key === "Escape") return () => card.focus();
  return null;
}

// Another group or step; the focus stays on the card at the same place.
async function keepingFocus(change) {
  const cards = [...at("cards").children];
  const place = cards.indexOf(document.activeElement?.closest?.(".card"));
  change();
  fillChoices();
  await showGroup();
  if (place >= 0) at("cards").children[Math.min(place, at("cards").children.length - 1)]?.focus();
}

function moveGroup(by) {
  const next = state.group + by;
  if (next >= 0 && next < groupsOf(stepNow()).length) return keepingFocus(() => (state.group = next));
  return Promise.resolve();
}

function moveStep(by) {
  const next = state.step + by;
  if (next < 0 || next >= runNow().steps.length) return Promise.resolve();
  return keepingFocus(() => {
    state.step = next;
    state.group = Math.min(state.group, groupsOf(stepNow()).length - 1);
  });
}
