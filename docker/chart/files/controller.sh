# Runs the controller. A run that is complete, or was stopped by its user, is not begun again and again:
# this process then waits for the end of its pod, whose files can be read meanwhile.
asyncrl "$@" &
child=$!
told=
trap 'told=yes; kill -TERM "$child" 2>/dev/null' TERM INT
while :; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break
done
[ "$code" -eq 0 ] && [ -z "$told" ] || exit "$code"
echo "The run has ended. helm uninstall gives its pods and GPUs back; its files stay."
python /etc/asyncrl/ended.py &
child=$!
wait "$child"
exit 0
