// From the page's data to text and numbers: base64, gzip, byte planes. `page_data.py` writes what is read here.
const INDEX = JSON.parse(document.getElementById("index").textContent);
const KEPT_NUMBERS = 8; // steps whose numbers stay unpacked
const texts = new Map();
const numbers = new Map();

async function unsqueeze(id) {
  const coded = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(coded.length);
  for (let place = 0; place < coded.length; place++) bytes[place] = coded.charCodeAt(place);
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).arrayBuffer();
}

// The texts of a step: prompts, completions, the tokens' names, what acted on the advantages.
function textsOf(step) {
  if (!texts.has(step.text)) {
    texts.set(step.text, unsqueeze(step.text).then((buffer) => JSON.parse(new TextDecoder().decode(buffer))));
  }
  return texts.get(step.text);
}

// The numbers of a step's tokens, or null where there are none.
function numbersOf(step) {
  if (step.numbers === null) return Promise.resolve(null);
  let found = numbers.get(step.numbers);
  if (found === undefined) {
    found = unsqueeze(step.numbers).then(unpack);
    if (numbers.size >= KEPT_NUMBERS) numbers.delete(numbers.keys().next().value);
    numbers.set(step.numbers, found);
  }
  return found;
}

function unpack(buffer) {
  const bytes = new Uint8Array(buffer);
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  const begins = [0];
  for (const count of header.counts) begins.push(begins[begins.length - 1] + count);
  const total = begins[begins.length - 1];
  const columns = {};
  let place = 4 + size;
  for (const [name, kind] of header.columns) {
    columns[name] = { kind, planes: Array.from({ length: 4 }, (_, n) => bytes.subarray(place + n * total, place + (n + 1) * total)) };
    place += 4 * total;
  }
  return { begins, columns };
}

// One row's values of a column.
function valuesOf(unpacked, name, row) {
  const { kind, planes } = unpacked.columns[name];
  const [from, to] = [unpacked.begins[row], unpacked.begins[row + 1]];
  const bits = new Int32Array(to - from);
  planes.forEach((plane, n) => {
    for (let at = from; at < to; at++) bits[at - from] |= plane[at] << (8 * n);
  });
  return kind === "integer" ? bits : new Float32Array(bits.buffer);
}
