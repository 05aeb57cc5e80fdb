// From the page's data to text and numbers: JSON in gzip in base64. `page_data.py` writes what is read here.
const INDEX = JSON.parse(document.getElementById("index").textContent);
const KEPT_NUMBERS = 8; // steps whose numbers stay unpacked
const texts = new Map();
const numbers = new Map();

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// The texts of a step: prompts, completions, the tokens' names, what acted on the advantages.
function textsOf(step) {
  if (!texts.has(step.text)) texts.set(step.text, unpack(step.text));
  return texts.get(step.text);
}

// The numbers of a step's tokens, a list per column for each row, or null where there are none.
function numbersOf(step) {
  if (step.numbers === null) return Promise.resolve(null);
  let found = numbers.get(step.numbers);
  if (found === undefined) {
    found = unpack(step.numbers).then((rows) => rows.map(withNaN));
    if (numbers.size >= KEPT_NUMBERS) numbers.delete(numbers.keys().next().value);
    numbers.set(step.numbers, found);
  }
  return found;
}

// JSON has null for what is not a number.
function withNaN(row) {
  const filled = (values) => Float64Array.from(values, (value) => value ?? NaN);
  for (const name of ["advantage", "weight", "logp", "entropy"]) row[name] = filled(row[name]);
  row.stage = row.stage.map(filled);
  return row;
}
