#!/usr/bin/env bash
# Checks the dashboard against the types that Grafana publishes (npm: @grafana/schema and,
# for queries, @grafana/grafana-foundation-sdk), as strictly as
# TypeScript can: an unknown key, a missing one or a value of another type is an error. Needs npm and
# the registry; uses a temporary folder.
set -euo pipefail
dashboard=$(cd "$(dirname "$0")" && pwd)/asyncrl.json
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
timeout 300 npm install --silent --no-audit --no-fund --ignore-scripts \
  @grafana/schema@13.2.3 @grafana/grafana-foundation-sdk@0.0.21 typescript@7.0.2 >&2
python3 - "$dashboard" > dashboard.ts <<'PYTHON'
import json, sys

whole = json.load(open(sys.argv[1]))
panels = whole.pop("panels")
print('import type { Dashboard, Panel, RowPanel } from "@grafana/schema";')
print('import type { Options, FieldConfig } from '
      '"@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";')
print('import type { Dataquery } from '
      '"@grafana/grafana-foundation-sdk/prometheus";')
print('type Query = Omit<Dataquery, "_implementsDataqueryVariant">;')
# JSON has names where TypeScript has enumerations: `Plain` accepts the values of one for the other.
print("type Plain<T> = T extends string ? `${T}` : T extends (infer E)[] ? Plain<E>[]"
      " : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;")
print(f"export const dashboard: Plain<Dashboard> = {json.dumps(whole)};")
for one in panels:
    kind = "RowPanel" if one["type"] == "row" else "Panel"
    print(f"export const panel{one['id']}: Plain<{kind}> = {json.dumps(one)};")
    if kind == "Panel":
        print(f"export const options{one['id']}: Plain<Options> = {json.dumps(one['options'])};")
        custom = json.dumps(one["fieldConfig"]["defaults"]["custom"])
        print(f"export const custom{one['id']}: Plain<FieldConfig> = {custom};")
        for target in one["targets"]:
            print(f"export const query{one['id']}{target['refId']}: Plain<Query> = "
                  f"{json.dumps(target)};")
PYTHON
npx tsc --noEmit --strict --skipLibCheck --module nodenext --moduleResolution nodenext dashboard.ts
echo "the dashboard agrees with @grafana/schema 13.2.3: $(grep -c 'export const' dashboard.ts) objects"
