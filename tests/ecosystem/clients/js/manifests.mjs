// Reads objects of Kubernetes's extensions as JSON from stdin, and checks each against the schema of its kind. Prints
// a JSON array with a message, or null, for each.

import { text } from "node:stream/consumers";

const PACKAGES = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

// The value, with the paths of all fields in `unread` until somebody reads them. The schemas let unknown fields pass,
// and never look at them.
function watched(value, path, unread) {
  if (typeof value !== "object" || value === null) {
    return value;
  }
  const inside = Object.fromEntries(
    Object.entries(value).map(([name, item]) => [name, watched(item, `${path}.${name}`, unread)]),
  );
  if (!Array.isArray(value)) {
    Object.keys(value).forEach((name) => unread.add(`${path}.${name}`));
  }
  return new Proxy(Array.isArray(value) ? Object.values(inside) : inside, {
    get(target, name) {
      unread.delete(`${path}.${String(name)}`);
      return target[name];
    },
  });
}

async function problem(object) {
  const [group, version] = object.apiVersion.split("/");
  const models = await import(`@kubernetes-models/${PACKAGES[group]}/${group}/${version}`);
  const model = new models[object.kind](object);
  const unread = new Set();
  model.spec = watched(object.spec, "spec", unread);
  try {
    model.validate();
  } catch (error) {
    return `${object.kind} ${object.metadata.name}: ${error.message}`;
  }
  return unread.size ? `${object.kind} ${object.metadata.name}: unknown ${[...unread].join(", ")}` : null;
}

const objects = JSON.parse(await text(process.stdin));
process.stdout.write(JSON.stringify(await Promise.all(objects.map(problem))));
