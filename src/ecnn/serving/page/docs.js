"use strict";

// Lists what /openapi.json says: every route, the fields of its body, and its answers.

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function kindOf(field) {
  if (field.enum) return field.enum.join(" | ");
  if (field.anyOf) return "text or nested lists of numbers";
  if (field.type === "array") return "list";
  return [].concat(field.type || "any").join(" or ");
}

function fieldTable(schema) {
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const title of ["field", "kind", "meaning"]) head.append(element("th", title));
  const body = table.createTBody();
  for (const [name, field] of Object.entries(schema.properties)) {
    const row = body.insertRow();
    const isNeeded = (schema.required || []).includes(name);
    row.append(element("td", name + (isNeeded ? " *" : ""), "code"));
    row.append(element("td", kindOf(field)));
    const standard = field.default === undefined ? "" : ` Otherwise ${JSON.stringify(field.default)}.`;
    row.append(element("td", (field.description || "") + standard));
  }
  return table;
}

function routeSection(path, method, route) {
  const section = element("section", undefined, "card");
  section.append(element("h2", `${method.toUpperCase()} ${path}`, "code"), element("p", route.summary));
  if (route.requestBody) {
    const [[kind, body], ...others] = Object.entries(route.requestBody.content);
    const scroll = element("div", undefined, "scroll");
    scroll.append(fieldTable(body.schema));
    section.append(element("h3", kind), scroll);
    for (const [other] of others) {
      section.append(element("p", `The same fields as ${other}, with images as files. * is needed.`, "quiet"));
    }
  }
  section.append(element("h3", "answers"));
  const list = element("dl");
  for (const [status, answer] of Object.entries(route.responses)) {
    list.append(element("dt", status, "code"), element("dd", answer.description));
  }
  section.append(list);
  return section;
}

async function show() {
  const main = document.getElementById("routes");
  try {
    const found = await (await fetch("/openapi.json")).json();
    main.replaceChildren();
    for (const [path, methods] of Object.entries(found.paths)) {
      for (const [method, route] of Object.entries(methods)) main.append(routeSection(path, method, route));
    }
  } catch (error) {
    main.replaceChildren(element("p", `openapi.json cannot be read: ${error.message}`));
  }
}

show();
