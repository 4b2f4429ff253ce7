"use strict";
const element = name => document.getElementById(name);
let searches = 0;

function call(path, options = {}) {
  const key = element("key").value;
  return fetch(path, {...options, headers: key ? {"X-API-Key": key} : {}});
}

function show(text, isError = false) {
  element("status").textContent = text;
  element("status").className = isError ? "error" : "";
}

async function describeGallery() {
  const answer = await call("v1/gallery");
  const content = await answer.json();
  if (answer.status === 401) element("key-line").hidden = false;
  element("gallery").textContent = answer.ok ? `${content.items} images` : content.error.message;
}

function line(parent, text, name = "") {
  const found = parent.appendChild(document.createElement("div"));
  found.textContent = text;
  found.className = name;
}

async function addPicture(box, id) {
  const answer = await call("v1/gallery/pictures/" + encodeURIComponent(id));
  if (!answer.ok) return;
  const image = document.createElement("img");
  image.src = URL.createObjectURL(await answer.blob());
  image.onload = () => URL.revokeObjectURL(image.src);
  image.alt = "";
  box.prepend(image);
}

function addMatch(match, metric) {
  const box = element("matches").appendChild(document.createElement("li"));
  line(box, match.name || match.id);
  if (match.decision !== null) {
    line(box, `${match.decision} (probability of the same identity ${(100 * match.probability).toFixed(1)} %)`, match.decision);
  } else if (match.impostor_fraction !== null) {
    line(box, `more similar than ${(100 * match.impostor_fraction).toFixed(1)} % of different pairs`);
  }
  line(box, `${metric === "cosine" ? "similarity" : "distance"} ${match.score.toFixed(4)}`);
  for (const name of ["identity", "camera", "time"]) if (match[name]) line(box, `${name} ${match[name]}`);
  addPicture(box, match.id);
}

async function search(file) {
  const number = ++searches, form = new FormData();
  form.append("images", file);
  form.append("k", element("count").value);
  form.append("camera", element("camera").value);
  if (element("query").src) URL.revokeObjectURL(element("query").src);
  element("query").src = URL.createObjectURL(file);
  element("query").hidden = false;
  element("matches").replaceChildren();
  show("Searching");
  try {
    const answer = await call("v1/search", {method: "POST", body: form});
    const content = await answer.json();
    if (number !== searches) return;  // a later search replaces this one
    if (answer.status === 401) element("key-line").hidden = false;
    if (!answer.ok) return show([content.error.message, content.error.fix].filter(Boolean).join("; "), true);
    const [query] = content.queries;
    const decision = query.decision === null ? "" : query.decision === "match" ? "Match: " : "Unknown: no match; ";
    show(`${decision}${query.found.length} of ${content.searched} images`);
    for (const match of query.found) addMatch(match, content.metric);
  } catch (error) {
    show("The service does not answer", true);
  }
}

const drop = element("drop");
for (const name of ["dragover", "dragenter"]) drop.addEventListener(name, event => {
  event.preventDefault();
  drop.classList.add("over");
});
for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
drop.addEventListener("drop", event => {
  event.preventDefault();
  if (event.dataTransfer.files.length) search(event.dataTransfer.files[0]);
});
element("file").addEventListener("change", event => {
  if (event.target.files.length) search(event.target.files[0]);
});
element("key").addEventListener("change", describeGallery);
describeGallery();
